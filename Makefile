# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Processes that tests run in, of one thread each: `make test JOBS=8` on a larger machine.
JOBS ?= 2
SHELL := /bin/bash

.PHONY: demo test test-slow test-multinode test-lowest lint types contracts docs resume-check clean

# `make demo FRESH=1` deletes a finished run first.
demo: $(READY)
	$(BIN)/python launch/demo.py $(if $(FRESH),--fresh)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-multinode: $(READY)
	$(BIN)/python -m pytest -m multinode

# The tests with the oldest version of each package that pyproject.toml allows, in an environment of its own.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[train,evaluation,test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Who may import whom: the contracts of import-linter in pyproject.toml.
contracts: $(READY)
	$(BIN)/lint-imports

# The documentation, in build/site.
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

# A short real pretraining on two ranks, killed between checkpoints and resumed.
resume-check: $(READY)
	$(BIN)/python .ci/resume_check.py

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "vlp needs Python 3.11 or newer; set PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,evaluation,test,docs]'
	touch $(READY)

clean:
	rm -rf runs shards build *.egg-info
