# make demo    train and judge students in the embedded world, on a CPU (runs/demo)
# make test    run the tests
# make check   lint, types and tests: what CI runs
# make shape   print the measures of the house
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test lint types check shape clean

demo: $(VENV)/installed
	$(BIN)/vocagnolm demo

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

check: lint types test

shape:
	python3 tests/support/shape.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (a minute or two) ..."
	$(INSTALL) .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) ".[dev]"
	touch $@
