# make demo         train and judge students in the embedded world, on a CPU (runs/demo)
# make check-fast   lint, types and unit tests
# make test         all tests but the slow ones
# make test-gpu     numbers, waits, memory and messages of a GPU, beside the CPU
# make check        lint, types and all tests: what CI runs
# make bench        the claims beside their peers: benchmarks/CLAIMS.md, in ten minutes
# make lowest       unit tests and gpu_first, tiny and on a CPU, with the lowest versions that
#                   pyproject.toml allows (PYTHON=python3.10)
# make newest       the same with the newest
# make lock         write constraints.txt from what is installed
# make docs         the pages as a site in runs/docs: strict about links
# make stranger     a first hour from the wheel, in a fresh environment
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
INSTALL = $(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable
# name>=1.2 becomes name==1.2
LOWER_BOUNDS = sed -nE 's/^.*"([a-z0-9-]+)(\[[^]]*\])?>=([0-9.]+).*/\1==\3/p' pyproject.toml

.PHONY: demo test test-all test-gpu test-unit lint types check check-fast bench lowest newest docs stranger lock clean

demo: $(VENV)/installed
	$(BIN)/vocagnolm demo

# More than the two cores of CI: tests of processes wait for much of their time. A file stays in one
# worker, so that what its tests share is made once.
WORKERS ?= 3
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-dev
	$(PYTEST) -m "not slow"

test-unit: WORKERS = 2
test-unit: $(VENV)/installed-dev
	$(PYTEST) -m "not slow and not processes" --hypothesis-profile=fast

test-all: $(VENV)/installed-dev
	$(PYTEST)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports

types: $(VENV)/installed-dev
	$(BIN)/mypy

# Types take one core of two, and tests wait for others now and then.
check: lint
	$(MAKE) -j 2 --output-sync types test-all

check-fast: lint types test-unit

# A claim that does not hold is in the page, and fails the command.
bench: $(VENV)/installed-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --page benchmarks/CLAIMS.md

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

stranger:
	.ci/stranger

lowest newest:
	$(MAKE) test-unit VENV=.venv-$@ CONSTRAINTS=.venv-$@/constraints.txt
	OMP_NUM_THREADS=1 .venv-$@/bin/python -m pytest tests/project/test_gpu_first.py

.venv-lowest/constraints.txt: pyproject.toml | .venv-lowest/bin/python
	$(LOWER_BOUNDS) > $@

.venv-newest/constraints.txt: | .venv-newest/bin/python
	touch $@

lock: $(VENV)/installed-dev
	$(BIN)/python tests/support/lock.py > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (a minute or two) ..."
	$(INSTALL) .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) ".[dev]"
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(INSTALL) ".[bench]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) ".[docs]"
	touch $@
