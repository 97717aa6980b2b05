# Everything from a fresh clone. Needs Python 3.11 or newer and a package index; all of it goes to $(VENV).
#
#   make demo       install, then write text with the tiny model on every backend of this machine
#   make test       the tests that a change must pass (CPU, minutes)
#   make check      format, lint, types, generated documentation
#   make test-all   all tests, slow ones included
#
# PYTHON=python3.12         the interpreter that makes the environment
# CONSTRAINTS=              without the pinned versions, e.g. on another platform or for a newer torch
# VENV=/path PIP_ARGS=...   another place; more arguments for pip, e.g. PIP_ARGS='--extra-index-url URL'

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(PIP_ARGS)

.PHONY: demo test check test-all clean

demo: $(VENV)/.installed
	$(BIN)/moetor demo

test: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/test

check: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/check

test-all: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/test -m "slow or not slow"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"moetor needs Python 3.11 or newer, got {sys.version.split()[0]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# the stamps are newer than what they were made from, so a second call installs nothing
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing moetor into $(VENV) (1.2 GB with torch for CPU; about a minute)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
