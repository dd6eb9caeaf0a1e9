# Every target creates the virtual environment that it needs on first use. `make help` lists the targets.

PYTHON ?= python3
TESTARGS ?= -q -n auto
BENCHARGS ?=
RUNARGS ?=
CONFORMANCEARGS ?=
# `make lock LOCKARGS=--upgrade` takes the newest releases within the bounds; plain `make lock` changes as little as possible.
LOCKARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
COMPILE = $(BIN)/uv pip compile --quiet --universal --generate-hashes --custom-compile-command "make lock" $(LOCKARGS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of Python processes; without bytecode files each of them would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# The lock file pins pyright; do not warn that a newer release exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# $(call make-venv,folder): creates a virtual environment if there is none, with the uv that requirements.lock pins. It installs
# packages in parallel.
define make-venv
	@test -x $(1)/bin/python || { \
		command -v "$(PYTHON)" >/dev/null || { \
			echo "$(PYTHON) not found; choose a Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo "Toolspace needs Python 3.11 or newer, not $$("$(PYTHON)" -V 2>&1); choose one: make PYTHON=python3.12"; exit 1; }; \
		echo "Creating $(1)"; "$(PYTHON)" -m venv $(1); }
	@test -x $(1)/bin/uv || { awk '/^uv==/,/^    # via/' requirements.lock > $(1)/uv.txt && \
		$(1)/bin/pip install --quiet --no-deps --require-hashes -r $(1)/uv.txt; }
endef

.DEFAULT_GOAL := help
.PHONY: run test check bench conformance peers fmt lock clean help

run: $(VENV)/.installed ## Install, and start the gateway with example tools; RUNARGS="--port 9000"
	@$(BIN)/toolspace --config examples/gateway/toolspace.yaml serve $(RUNARGS)

test: peers ## Run the tests; TESTARGS="-x -k name" replaces "-q -n auto"
	@$(BIN)/pytest $(TESTARGS)

peers: $(VENV)/.installed ## Download the third-party MCP servers and documents that the tests use
	@$(BIN)/python -m tests.peers.install

conformance: $(VENV)/.installed ## Run the MCP conformance suite on our server and client; CONFORMANCEARGS="--side client"
	@$(BIN)/python -m tests.peers.install conformance
	@$(BIN)/python -m tests.conformance $(CONFORMANCEARGS)

check: $(VENV)/.installed ## Check format, lint, names, types and layers
	@echo "Format (ruff format)"
	@$(BIN)/ruff format --check . || { echo "To format: make fmt"; exit 1; }
	@echo "Lint (ruff check)"
	@$(BIN)/ruff check --quiet .
	@echo "Names (tools/plain_names.py)"
	@$(BIN)/python tools/plain_names.py
	@echo "Types (pyright)"
	@$(BIN)/pyright
	@echo "Layers (import-linter)"
	@$(BIN)/lint-imports --no-logo

bench: $(BENCH_VENV)/.installed ## Measure against other libraries, in .venv-bench
	@$(BENCH_VENV)/bin/python -m benchmarks $(BENCHARGS)

fmt: $(VENV)/.installed ## Format the code and apply lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format --quiet .

lock: ## Resolve both lock files; LOCKARGS=--upgrade for newer releases
	$(call make-venv,$(VENV))
	@echo "Resolving requirements.lock"
	@$(COMPILE) pyproject.toml --extra dev --output-file requirements.lock
	@echo "Resolving benchmarks/requirements.lock"
	@$(COMPILE) pyproject.toml benchmarks/requirements.in --output-file benchmarks/requirements.lock

clean: ## Delete the environments, caches and build results
	@rm -rf $(VENV) $(BENCH_VENV) .peers build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml requirements.lock
	$(call make-venv,$(VENV))
	@echo "Installing the packages of requirements.lock into $(VENV)"
	@$(VENV)/bin/uv pip install --quiet --compile-bytecode --require-hashes --python $(VENV)/bin/python -r requirements.lock
	@$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python --no-deps -e .
	@touch $@

$(BENCH_VENV)/.installed: pyproject.toml benchmarks/requirements.lock
	$(call make-venv,$(BENCH_VENV))
	@echo "Installing the packages of benchmarks/requirements.lock into $(BENCH_VENV)"
	@$(BENCH_VENV)/bin/uv pip install --quiet --compile-bytecode --require-hashes --python $(BENCH_VENV)/bin/python \
		-r benchmarks/requirements.lock
	@$(BENCH_VENV)/bin/uv pip install --quiet --python $(BENCH_VENV)/bin/python --no-deps -e .
	@touch $@
