# Trunkline: set-up, checks, tests, and a mesh on this machine. `make help` prints the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
# pip draws its progress bars on a terminal and stays silent in a log
PIP_INSTALL := $(RUN) -m pip --disable-pip-version-check install --constraint constraints.txt \
	$(shell [ -t 2 ] || echo --quiet)

STUBS := protos/gen/python
PROTO_FILES = $(shell find protos/trunkline -name '*.proto' | LC_ALL=C sort)
MODEL := .trunkline/models/smollm2-135m-instruct

WORKERS ?= 1
ROUTERS ?= 1
GATEWAYS ?= 1
DETACH ?=
SHAPE ?= 8b
MODE ?= fused

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-22s %s\n", $$1, $$2}' Makefile

##@ Run

.PHONY: up down status
up: setup ## start a mesh and stream a first answer (WORKERS= ROUTERS= GATEWAYS= DETACH=1)
	@$(RUN) -m trunkctl mesh up --workers $(WORKERS) --routers $(ROUTERS) --gateways $(GATEWAYS) $(if $(DETACH),--detach)

down: $(VENV)/.packages ## end the mesh that `make up` started
	@$(RUN) -m trunkctl mesh down

status: $(VENV)/.packages ## show the processes of the mesh
	@$(RUN) -m trunkctl mesh status

##@ Set-up

.PHONY: setup kernels kernels-cuda model clean
setup: $(VENV)/.packages kernels model ## everything the mesh and the tests need; quick when run again

kernels: $(VENV)/.packages ## build the native kernels for this processor, unless they are current
	@$(RUN) -m trunkline_kernels.build

kernels-cuda: $(VENV)/.packages ## build the CUDA kernels, unless they are current; no GPU is needed, and without nvcc it is skipped
	@$(RUN) -m trunkline_kernels.cuda.build

model: $(MODEL)/manifest.json ## fetch and convert the model the mesh serves by default

clean: ## end the mesh and remove what set-up, build and run left behind
	@[ ! -x $(RUN) ] || $(RUN) -m trunkctl mesh down || true
	@rm -rf $(VENV) .trunkline build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@[ -n "$(PYTHON)" ] || { echo "Trunkline needs Python 3.11 or newer, and none was found (PYTHON=/path/to/python names one)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Trunkline needs Python 3.11 or newer; $(PYTHON) is not that." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Trunkline needs Python's venv module (Debian packages it as python3-venv)." >&2; exit 1; }
	@command -v c++ g++ clang++ >/dev/null || { echo "Trunkline needs a C++ compiler (c++, g++ or clang++), and none was found." >&2; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first and as exactly the pinned release: a looser request may bring another, much larger build.
$(VENV)/.torch: constraints.txt | $(RUN)
	@echo "==> torch, the largest package"
	@$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.packages: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "==> packages"
	@$(PIP_INSTALL) --editable '.[worker,dev]'
	@touch $@

$(MODEL)/manifest.json: | $(VENV)/.packages kernels
	@echo "==> model"
	@$(RUN) -m trunkctl model fetch

##@ Test

SEEDS ?= 1000
GPU_PYTHON ?= python3
GPU_TESTS ?= $(sort $(wildcard tests/gpu/test_*.py))

.PHONY: test test-quick test-e2e test-gpu test-many test-sim test-sim-mutations chaos bench bench-mesh bench-kernels bench-engine bench-online
test: setup kernels-cuda ## the whole suite; tests that need a GPU are skipped where none is
	@$(RUN) -m pytest tests

test-quick: setup ## unit and property tests
	@$(RUN) -m pytest tests/unit tests/property

test-e2e: setup ## the tests that run a whole mesh of real processes
	@$(RUN) -m pytest tests/e2e

# Needs torch for CUDA, pytest and msgspec, no more, so that a bare GPU machine will do. One process a file: an illegal
# access or a kernel that hangs spoils the process in which it happens.
test-gpu: ## the CUDA kernels on a GPU, which must be there (GPU_PYTHON= GPU_TESTS=)
	@PYTHONPATH=.:kernels/python $(GPU_PYTHON) -m trunkline_kernels.cuda.build
	@failed=0; for file in $(GPU_TESTS); do \
		TRUNKLINE_TEST_GPU=1 PYTHONPATH=.:kernels/python:protos/gen/python timeout 300 $(GPU_PYTHON) -m pytest -c /dev/null --rootdir=. \
			--confcutdir=tests/gpu --import-mode=importlib -p no:cacheprovider -q -rfE "$$file" || failed=1; \
	done; exit $$failed

test-many: setup ## 1,000 disconnects and resumes, 1,000 keys asked three times while a gateway dies
	@TRUNKLINE_TEST_RESUMES=1000 $(RUN) -m pytest tests/contract/test_gateway_resume.py -k many

test-sim: setup ## the mesh on virtual time: the named races, then random worlds (SEEDS=)
	@$(RUN) -m pytest tests/sim -q -m "not mutations" -k "not random"
	@$(RUN) -m tests.sim --seeds $(SEEDS)

test-sim-mutations: setup ## break each rule of the wire on purpose: a named race must fail
	@$(RUN) -m tests.sim.mutations

chaos: setup ## real processes killed and stopped, links cut, under load; scorecards in tests/bench/results
	@$(RUN) -m tests.chaos --engine latency --out tests/bench/results/cpu
	@$(RUN) -m tests.chaos --engine smollm2 --out tests/bench/results/cpu

bench: setup ## the engine alone, then the whole mesh, on this machine; results in tests/bench/results
	@$(RUN) -m tests.bench.engine_cpu
	@$(RUN) -m tests.bench.mesh_cpu

bench-mesh: setup ## the mesh rows of the targets, with the latency-model engine; results in tests/bench/results
	@$(RUN) -m tests.bench.mesh

bench-kernels: setup kernels-cuda ## the CUDA calls on a GPU: right, then their time beside torch's and the roof
	@$(RUN) -m tests.bench.kernels_gpu

bench-engine: setup ## the engine's rows of the targets on a GPU, with random weights (SHAPE=8b|1b|135m MODE=)
	@$(RUN) -m tests.bench.engine_gpu --shape $(SHAPE) --kernel-mode $(MODE)

bench-online: setup ## open-loop streaming load on the mesh with a GPU, and on vllm serve where it is installed (SHAPE= MODE=)
	@$(RUN) -m tests.bench.online_gpu --shape $(SHAPE) --kernel-mode $(MODE)

##@ Check, and mend what can be mended

.PHONY: verify fix verify-lint fix-lint verify-format fix-format verify-types verify-imports
.PHONY: verify-protos fix-protos verify-stubs fix-stubs verify-breaking protos
verify: verify-lint verify-format verify-types verify-imports verify-protos verify-stubs verify-breaking ## every check below

fix: fix-lint fix-format fix-protos fix-stubs ## every mend below

verify-lint: $(VENV)/.packages ## ruff: lint and banned calls
	@$(BIN)/ruff check

fix-lint: $(VENV)/.packages ## ruff: what it can mend by itself
	@$(BIN)/ruff check --fix

verify-format: $(VENV)/.packages ## ruff: layout
	@$(BIN)/ruff format --check

fix-format: $(VENV)/.packages ## ruff: lay the code out
	@$(BIN)/ruff format

verify-types: $(VENV)/.packages ## mypy, strict
	@$(BIN)/mypy

verify-imports: $(VENV)/.packages ## import-linter: which package may import which
	@$(BIN)/lint-imports --no-logo

verify-protos: $(VENV)/.packages ## buf: lint and layout of the protos
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

fix-protos: $(VENV)/.packages ## buf: lay the protos out
	@$(BIN)/buf format --write

# The stubs' import path is the proto path, so nothing is rewritten after generation.
define generate-stubs
	@rm -rf $(VENV)/stubs && mkdir $(VENV)/stubs
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(RUN) -m grpc_tools.protoc --proto_path=protos --python_out=$(VENV)/stubs \
		--pyi_out=$(VENV)/stubs --grpc_python_out=$(VENV)/stubs --mypy_grpc_out=quiet:$(VENV)/stubs $(PROTO_FILES)
endef

verify-stubs: $(VENV)/.packages ## the checked-in stubs are those of the protos
	$(generate-stubs)
	@diff --recursive --brief --exclude=__pycache__ $(VENV)/stubs $(STUBS) || { echo "The stubs are stale: make fix-stubs" >&2; exit 1; }

fix-stubs: $(VENV)/.packages ## generate the stubs
	$(generate-stubs)
	@rm -rf $(STUBS)/trunkline && mkdir -p $(STUBS) && cp -r $(VENV)/stubs/trunkline $(STUBS)/

protos: fix-protos fix-stubs ## lay the protos out and generate the stubs

# Against main as published, or as committed here where nothing is published.
verify-breaking: $(VENV)/.packages ## buf: no change that breaks a peer which speaks main's protos
	@ref=$$(git rev-parse --verify --quiet origin/main || git rev-parse --verify --quiet main || true); \
	if [ -z "$$ref" ] || [ -z "$$(git ls-tree -r --name-only "$$ref" -- protos/trunkline)" ]; then echo "no protos on main to compare with"; \
	else $(BIN)/buf breaking --against "$$(git rev-parse --git-common-dir)#ref=$$ref"; fi
