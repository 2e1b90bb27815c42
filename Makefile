# make run        set up everything and run the main job: SMP on the built-in benchmark
# make test       set up everything and run the tests
# make test-all   the slow tier as well: browser, cluster, several processes, README commands
# make test-faults  a power cut and a failing disk before every file operation; goes on where it was stopped
# make lint       ruff: lint and format check
# make types      mypy
# make docs       the documentation as a site: build/site/index.html
# make versions   write down the versions that the slow tier ran with: constraints/tested.txt
#
# Only Python >= 3.11 (with venv) is assumed. Variables: PYTHON, VENV, ARGS (passed to `fscil run` or pytest), PIP_FLAGS.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=
ARGS ?=

.PHONY: run test test-all test-faults lint types format docs versions clean
.DEFAULT_GOAL := run

run: $(VENV)/.installed
	$(BIN)/fscil run $(ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/.installed-slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)
	$(BIN)/python -m pytest -m slow --timeout 1200 $(ARGS)

test-faults: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/faulting.py --record .faults.jsonl $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

versions: $(VENV)/.installed-slow
	@echo "# Every version that the complete tests ran with, on Linux and $$($(BIN)/python --version): make versions" > constraints/tested.txt
	$(BIN)/python -m pip freeze --exclude-editable >> constraints/tested.txt

# The stamps make a second call start at once; they are older than pyproject.toml only when the dependencies changed.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e ".[dev]"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e ".[docs]"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-slow: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e ".[slow]"
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .faults.jsonl
