# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Processes that tests run in, of one thread each: `make test JOBS=8` on a larger machine.
JOBS ?= 2
SHELL := /bin/bash

.PHONY: demo test test-commands test-nightly test-gpu test-lowest lint types contracts docs resume-check proof prose lock clean

# `make demo FRESH=1` deletes an earlier demo first.
demo: $(READY)
	$(BIN)/python -m launch demo $(if $(FRESH),--fresh)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --durations=30

# One whole command of each family: data, pretraining, fine-tuning, vision training, evaluation.
test-commands: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m commands --durations=30

# Hours: what takes long, kills ranks and nodes, needs a Ray cluster or Chromium, 10,000 mutated files, and fifteen minutes
# of random faults. `TESTS=FOLDER` runs a part of it; VLP_CHAOS (seconds), VLP_CHAOS_SEED and VLP_FUZZ_SEED vary it.
test-nightly: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly --durations=60 $(TESTS)

# Tests of kernels, which need a GPU; all others run on the CPU wherever they run.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

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

# Every figure that a refactoring may not change, as JSON: `make proof OUT=build/old.json`, and after it
# `make proof AGAINST=build/old.json`; `QUICK=1` leaves the demo out.
proof: $(READY)
	$(BIN)/python .ci/proof.py --out $(or $(OUT),build/proof.json) $(if $(AGAINST),--against $(AGAINST)) $(if $(QUICK),--quick)

# Words that make names and docstrings slow to read; a report, never a gate. `PATHS=vlp/data` lists places.
prose: $(READY)
	$(BIN)/python .ci/prose.py $(PATHS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "vlp needs Python 3.11 or newer; set PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,evaluation,test,docs]'
	touch $(READY)

# The newest versions of all packages into constraints.txt, for every Python and system.
lock: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	mkdir -p build && sed -n 1p constraints.txt > build/constraints.txt
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --all-extras --no-annotate --no-header >> build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf runs shards build *.egg-info
