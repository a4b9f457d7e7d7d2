# make demo | accelerator | test | test-unit | test-all | style | typecheck | docs | dist | clean
#
#   VENV=DIR        environment to use, made if missing; a PyTorch that it holds is kept   (.venv)
#   PYTHON=EXE      interpreter to make it with; its CUDA build of PyTorch is used         (python3)
#   EXTRAS=LIST     extras that `make install` brings; docs/install.md                          (all)
#   ARGS="..."      further arguments of `make demo` and `make test...`, e.g. ARGS="-k zero"

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?= constraints/tested.txt
ARGS ?=
EXTRAS ?= all

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto
UNIT_WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))# some wait, for sockets and threads
INSTALLED := $(VENV)/.hf-diloco
INSTALLED_DEV := $(VENV)/.hf-diloco-dev

export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export DS_BUILD_OPS := 0
# Else every process would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install install-dev demo accelerator test test-unit test-slow test-all style format typecheck docs dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(INSTALLED) ## train a small Llama on two islands of this machine
	$(BIN)/hf-diloco launch quickstart $(ARGS)

accelerator: $(INSTALLED_DEV) ## measure and check everything on one CUDA GPU, in ten minutes; ARGS="--only copies"
	$(BIN)/python -m benchmarks.accelerator $(ARGS)

test: $(INSTALLED_DEV) ## run the tests, but for those marked slow; ARGS="-k zero" runs a few
	$(PYTEST) -m "not slow" $(ARGS)

test-unit: $(INSTALLED_DEV) ## run the tests of functions and classes by themselves
	$(PYTEST) -n $(UNIT_WORKERS) tests/unit -m "not slow and not distributed" $(ARGS)

test-slow: $(INSTALLED_DEV) ## run the tests that `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-all: $(INSTALLED_DEV) ## run all tests
	$(PYTEST) $(ARGS)

style: $(INSTALLED_DEV) ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(INSTALLED_DEV) ## format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: $(INSTALLED_DEV) ## check types
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(INSTALLED_DEV) ## build the documentation site into build/site; a warning is an error
	$(BIN)/python -m mkdocs build --strict

dist: $(INSTALLED_DEV) ## build source and wheel for a release
	$(PIP) build
	$(BIN)/python -m build

install: $(INSTALLED) ## make the environment for using the package

install-dev: $(INSTALLED_DEV) ## make the environment for working on it

clean: ## remove builds and caches; environments and runs stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# An environment of an interpreter that has a CUDA build of PyTorch sees that build.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 needed: make ... PYTHON=python3.11")'
	@echo "making $(VENV)"
	@if $(PYTHON) -c 'import torch; raise SystemExit(torch.version.cuda is None)' 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi

# PyTorch comes first: by itself, an open range further down would bring the newest one, with gigabytes of CUDA.
$(INSTALLED): pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	@echo "installing into $(VENV): a few minutes the first time"
	@$(BIN)/python -c 'import torch' 2>/dev/null \
	|| if nvidia-smi -L >/dev/null 2>&1; then $(PIP) torch; else $(PIP) -c constraints/cpu.txt torch; fi
	$(PIP) -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@
