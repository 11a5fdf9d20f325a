# make demo         make an environment, then train and judge students in the embedded world (runs/demo)
# make test         make an environment, then run all tests but the slow ones
# make check-fast   lint, types and unit tests
# make check        lint, types and all tests, including the slow ones
# make test-real    what a user types with pretrained models, in the directory VOCAGNOLM_TEST_MODELS
# make test-gpu     compare numbers, waits, memory and messages of a GPU with the CPU's
# make hour         what the pages tell a newcomer to type, in a fresh clone and a fresh environment
# make newest       unit tests and the hour with the newest versions that pyproject.toml allows
# make lowest       unit tests and the hour with the lowest ones
# make bench        the claims beside their peers: benchmarks/CLAIMS.md; with VOCAGNOLM_TEST_MODELS, too
# make lock         write constraints.txt from what is installed
# make docs         build the pages as a site in runs/docs, strict about links
# make clean        remove the environment
#
# PYTHON=python3.12 takes another Python, TORCH=torch==2.13.0 a PyTorch that is installed first.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# Modules are compiled when they are first imported, which most never are. Container images often
# forbid writing what was compiled, and then each process compiles its imports again: a quarter of
# the tests' time.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
INSTALL = $(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable
# name>=1.2 becomes name==1.2, but for a PyTorch that is there.
LOWER_BOUNDS = sed -nE 's/^.*"([a-z0-9-]+)(\[[^]]*\])?>=([0-9.]+).*/\1==\3/p' pyproject.toml \
	| grep -v '^$(if $(TORCH),torch,no-such-package)=='

.PHONY: help demo test test-slow test-real test-gpu test-unit lint types check check-fast hour bench lowest \
	newest docs lock clean

help:
	@sed -n '/^# make/s/^# //p' $(firstword $(MAKEFILE_LIST))

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

test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow

test-real: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/real

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
	$(MAKE) -j 2 --output-sync types test
	$(MAKE) test-slow

check-fast: lint types test-unit

HOUR = $(PYTHON) tests/project/first_hour.py $(if $(TORCH),--torch $(TORCH))

hour:
	$(HOUR)

# A claim that does not hold is in the page, and fails the command.
bench: $(VENV)/installed-bench $(VENV)/installed-dev
	$(BIN)/python -m pytest -q tests/run/test_trl.py
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --page benchmarks/CLAIMS.md

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lowest newest:
	$(MAKE) .venv-$@/constraints.txt VENV=.venv-$@
	$(HOUR) --constraint .venv-$@/constraints.txt
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
	$(if $(TORCH),$(PIP_INSTALL) $(TORCH))

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
