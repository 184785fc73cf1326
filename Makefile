# Every verb of the project. `make demo` and `make test` set up what they need first.
# Variables: PYTHON (3.11+), TORCH_INDEX (index that holds the torch build you want), ONLY (limits soak, oracles, bench),
#            SEED (demo).
SHELL := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ONLY   ?=
SEED   ?= 1
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test soak oracles check bench fix wheel-check clean

setup:                ## create .venv, install pinned packages, runtime and sandbox template
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup.sh

demo: setup           ## the main job: RL on a K3-architecture model with tools in real sandboxes
	@$(BIN)/tidemill rl run toolcalc --seed $(SEED)

test: setup           ## the CI tier of the tests (at most 10 minutes)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not soak"

check: setup          ## style, types, import contracts, dependencies
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/deptry src

soak: setup           ## full counts; ONLY=NAME picks one; dated JSON in benchmarks/soak/
	@$(BIN)/python benchmarks/run_soak.py $(ONLY)

oracles: setup        ## independent implementations (first time: llama.cpp is compiled); dated table in docs/oracles.md
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/oracles.sh
	@$(BIN)/python benchmarks/run_oracles.py $(ONLY)

bench: setup          ## measurements against benchmarks/targets.yaml; JSON in benchmarks/results/
	@$(BIN)/python benchmarks/run_bench.py $(ONLY)

wheel-check: setup    ## build the wheel, install it into an empty environment, run doctor and chat from it
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/check_wheel.sh

fix: setup            ## apply what the linter can repair by itself
	@$(BIN)/ruff check --fix .

clean:                ## remove the environment and build products (runs/ stays)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
