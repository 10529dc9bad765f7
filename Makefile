# The two commands of the README are `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE := src tests examples benchmarks tools docs/tutorials
PYTEST := $(BIN)/pytest -n auto --dist worksteal
unexport PYTHONDONTWRITEBYTECODE  # a test that starts a process would compile the package again each time

.PHONY: help setup demo test check test-browser test-network test-elsewhere lint types docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 22

.venv/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Fedkeel needs Python 3.10 or newer: make PYTHON=python3.11")'
	@echo "Setting up .venv (once; a few minutes the first time, torch is large) ..."
	@$(PYTHON) -m venv .venv
	@# A build of torch that is kept on the machine (pip's find-links) goes before the registry's, which brings CUDA along.
	@sed -n '/^torch==/,/[^\\]$$/p' constraints.txt > .venv/torch.txt
	@$(PIP) --no-deps --require-hashes --no-index -r .venv/torch.txt 2> /dev/null || true
	@sed '/^# --- for development/,$$d' constraints.txt > .venv/core.txt
	@$(PIP) --no-deps --require-hashes -r .venv/core.txt && $(PIP) --no-build-isolation -e . && touch $@

.venv/.ready: .venv/.core
	@echo "Adding what the tests need to .venv (once) ..."
	@$(PIP) --no-deps --require-hashes -r constraints.txt && $(PIP) --no-build-isolation -e ".[dev]" && touch $@

setup: .venv/.ready  ## the environment with everything
demo: .venv/.core  ## what shifts do to federated learning, on the embedded digits (about two minutes)
	@$(BIN)/fedkeel demo
test: lint  ## lint, types and every test that needs Python and make alone
	@$(BIN)/mypy & $(PYTEST) -m "not network and not browser"; code=$$?; wait $$! && exit $$code
check: lint  ## lint, types and the quick tests, for while you work
	@$(BIN)/mypy & $(PYTEST) -m "not slow and not browser"; code=$$?; wait $$! && exit $$code
test-browser: .venv/.ready  ## the report, the page of a run and the book in Chromium (apt-get install chromium)
	@$(PYTEST) -m browser
test-network: .venv/.ready  ## federations of real processes on loopback (minutes for each test)
	@$(BIN)/pytest -m network
test-elsewhere: .venv/.ready  ## every test on one core, under load and with fewer CPU instructions (about an hour)
	@.ci/elsewhere
lint: .venv/.ready
	@$(BIN)/ruff check $(CODE) && $(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/python tools/private.py
	@$(BIN)/lint-imports --no-cache
types: .venv/.ready
	@$(BIN)/mypy
docs: .venv/.ready  ## the book, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
clean:  ## remove what the others made
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
