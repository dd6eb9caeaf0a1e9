# Everything runs in a virtual environment of its own, made on first use. `make help` lists the targets.

PYTHON ?= python3
TESTARGS ?= -q -n auto
BENCHARGS ?=
RUNARGS ?=
CONFORMANCEARGS ?=
# `make lock LOCKARGS=--upgrade` takes the newest releases that fit; plain `make lock` changes what it must.
LOCKARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
COMPILE = $(BIN)/uv pip compile --quiet --universal --custom-compile-command "make lock" $(LOCKARGS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The lock pins pyright; that a newer one exists is no news to a check.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# $(call make-venv,folder): makes a virtual environment where there is none, if the Python is new enough.
define make-venv
	@test -x $(1)/bin/python || { \
		command -v "$(PYTHON)" >/dev/null || { \
			echo "$(PYTHON) was not found; name a Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo "Toolspace needs Python 3.11 or newer, not $$("$(PYTHON)" -V 2>&1); name one: make PYTHON=python3.12"; exit 1; }; \
		echo "Making $(1)"; "$(PYTHON)" -m venv $(1); }
endef

.DEFAULT_GOAL := help
.PHONY: run test check bench conformance peers fmt lock clean help

run: $(VENV)/.installed ## Set up, and start the gateway with a few tools to try; RUNARGS="--port 9000"
	@$(BIN)/toolspace --config examples/gateway/toolspace.yaml serve $(RUNARGS)

test: peers ## Run the tests; TESTARGS="-x -k name" goes to pytest in place of "-q -n auto"
	@$(BIN)/pytest $(TESTARGS)

peers: $(VENV)/.installed ## Fetch the MCP servers and documents of others that the tests use
	@$(BIN)/python -m tests.peers.install

conformance: $(VENV)/.installed ## Run the MCP conformance suite on our server and client; CONFORMANCEARGS="--side client"
	@$(BIN)/python -m tests.peers.install conformance
	@$(BIN)/python -m tests.conformance $(CONFORMANCEARGS)

check: $(VENV)/.installed ## Check format, lint, types and layers
	@echo "Format (ruff format)"
	@$(BIN)/ruff format --check . || { echo "To format: make fmt"; exit 1; }
	@echo "Lint (ruff check)"
	@$(BIN)/ruff check --quiet .
	@echo "Types (pyright)"
	@$(BIN)/pyright
	@echo "Layers (import-linter)"
	@$(BIN)/lint-imports --no-logo

bench: $(BENCH_VENV)/.installed ## Measure against other libraries, in an environment of its own
	@$(BENCH_VENV)/bin/python -m benchmarks $(BENCHARGS)

fmt: $(VENV)/.installed ## Format the code and mend what lint can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format --quiet .

lock: ## Resolve both lock files again; LOCKARGS=--upgrade for newer releases
	$(call make-venv,$(VENV))
	@test -x $(BIN)/uv || $(BIN)/pip install --quiet "uv<1"
	@echo "Resolving requirements.lock"
	@$(COMPILE) pyproject.toml --extra dev --output-file requirements.lock
	@echo "Resolving benchmarks/requirements.lock"
	@$(COMPILE) pyproject.toml benchmarks/requirements.in --output-file benchmarks/requirements.lock

clean: ## Remove the environments, caches and build results
	@rm -rf $(VENV) $(BENCH_VENV) .peers build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml requirements.lock
	$(call make-venv,$(VENV))
	@echo "Installing what requirements.lock names into $(VENV)"
	@$(BIN)/pip install --quiet -r requirements.lock
	@$(BIN)/pip install --quiet --no-deps -e .
	@touch $@

$(BENCH_VENV)/.installed: pyproject.toml benchmarks/requirements.lock
	$(call make-venv,$(BENCH_VENV))
	@echo "Installing what benchmarks/requirements.lock names into $(BENCH_VENV)"
	@$(BENCH_VENV)/bin/pip install --quiet -r benchmarks/requirements.lock
	@$(BENCH_VENV)/bin/pip install --quiet --no-deps -e .
	@touch $@
