# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Processes that tests run in, of one thread each: `make test JOBS=8` on a larger machine.
JOBS ?= 2
SHELL := /bin/bash

.PHONY: demo test test-integration test-gpu test-slow test-multinode test-ray test-browser test-lowest fuzz chaos page-check forms-check lint types contracts docs resume-check proof lock clean

# `make demo FRESH=1` deletes a finished run first.
demo: $(READY)
	$(BIN)/python launch/demo.py $(if $(FRESH),--fresh)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --durations=60

# Whole commands, trainings and what else takes long; a file's tests share what it prepares.
test-integration: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m integration --durations=60

# Tests of kernels, which need a GPU; all others run on the CPU wherever they run.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-multinode: $(READY)
	$(BIN)/python -m pytest -m multinode

# Data tools on a real Ray cluster of two nodes on this machine, one of which is killed.
test-ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python -m pytest -m ray

# The local page in Chromium, which must be installed; skipped without.
test-browser: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/evaluation/demo

# The tests with the oldest version of each package that pyproject.toml allows, in an environment of its own.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[train,evaluation,test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n $(JOBS)

# 10,000 mutated files of every kind that is read, in about ten minutes; `make fuzz SEED=7` mutates otherwise.
fuzz: $(READY)
	VLP_FUZZ=10000 VLP_FUZZ_SEED=$(or $(SEED),30) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/data/hostile

# Kills, signals, full disks, failing stores and more for fifteen minutes over training and data tools on two ranks; results stay equal
# bit for bit. `make chaos SEED=7 SECONDS=60` has other faults, and fewer; `SECONDS=9000 FAULTS=300` ends
# when 300 have come, 20 of each kind; `make test-integration` runs half a minute.
chaos: $(READY)
	VLP_CHAOS=$(or $(SECONDS),900) VLP_CHAOS_SEED=$(or $(SEED),30) VLP_CHAOS_FAULTS=$(or $(FAULTS),0) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m integration tests/launch/cluster/chaos

# From an encoding in twenty lines to a table of its comparison with seeds, by the commands of its page.
page-check: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/evaluation/ablations/test_comparison.py

# 300 own images in each of ten forms: shards, training, recall table, page, by the commands of their page.
forms-check: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/package/test_own_images.py

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
