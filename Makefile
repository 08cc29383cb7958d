# Trunkline: set-up, checks, tests, and a mesh on this machine. `make help` prints the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTOS = $(shell find protos -name '*.proto' -not -path 'protos/gen/*' 2>/dev/null | LC_ALL=C sort)
KERNELS = $(shell find kernels -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name 'build.py' 2>/dev/null)
STUBS := protos/gen/python
MODEL := .trunkline/models/smollm2-135m-instruct

WORKERS ?= 1
ROUTERS ?= 1
GATEWAYS ?= 1

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' Makefile

##@ Set-up

.PHONY: setup
setup: $(VENV)/.packages kernels model ## everything the mesh and the tests need; quick when run again

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "Trunkline needs Python 3.11 or newer, and none was found (set PYTHON=/path/to/python)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Trunkline needs Python 3.11 or newer; $(PYTHON) is not."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "Trunkline needs Python's venv module (on Debian: the package python3-venv)."; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first and as exactly the pinned release: any looser request may bring a second, larger build.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "==> torch, the largest package"
	@$(PIP) install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.packages: pyproject.toml constraints.txt $(VENV)/.torch | $(BIN)/python
	@echo "==> packages"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[worker,dev]'
	@touch $@
