# The two commands of the README are `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# A test that starts a process would compile the package again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-browser test-elsewhere test-network check lint types docs clean help setup

help:
	@echo "make demo   what shifts do to federated learning, on the embedded digits (about two minutes)"
	@echo "make test   lint, types and every test that needs Python and make alone"
	@echo "make test-browser   the report, the page of a run and the book in Chromium (apt-get install chromium)"
	@echo "make test-elsewhere   every test on one core, under load and with fewer CPU instructions (about an hour)"
	@echo "make test-network   a federation of real processes on loopback (minutes for each test)"
	@echo "make check  lint, types and the quick tests (under two minutes)"
	@echo "make docs   build the documentation into site/"
	@echo "make clean  remove what the others made"

setup: $(READY)

# What the package itself needs, for the demo; the first part of constraints.txt.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Fedkeel needs Python 3.10 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes the first time, torch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@# A build of torch that is kept on the machine (pip's find-links) goes before the registry's, which brings CUDA along.
	@sed -n '/^torch==/,/[^\\]$$/p' constraints.txt > $(VENV)/torch.txt
	@$(PIP) --no-deps --require-hashes --no-index -r $(VENV)/torch.txt 2> /dev/null || true
	@sed '/^# --- for development/,$$d' constraints.txt > $(VENV)/core.txt
	@$(PIP) --no-deps --require-hashes -r $(VENV)/core.txt
	@$(PIP) --no-build-isolation -e .
	@touch $(CORE)

# And what the tests, the documentation and the extras need, in the same environment.
$(READY): $(CORE)
	@echo "Adding what the tests need to $(VENV) (once) ..."
	@$(PIP) --no-deps --require-hashes -r constraints.txt
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $(READY)

demo: $(CORE)
	@$(BIN)/fedkeel demo

lint: $(READY)
	@echo "ruff ..."
	@$(BIN)/ruff check src tests examples benchmarks tools docs/tutorials
	@$(BIN)/ruff format --check --quiet src tests examples benchmarks tools docs/tutorials \
		|| { echo "Some files are not formatted: run $(BIN)/ruff format src tests examples benchmarks tools docs/tutorials"; exit 1; }
	@echo "nothing private ..."
	@$(BIN)/python tools/private.py
	@echo "imports go downwards ..."
	@$(BIN)/lint-imports --no-logo --no-cache > $(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }

types: $(READY)
	@echo "mypy --strict ..."
	@$(BIN)/mypy

# mypy works on one core: it goes beside the tests, and says at their end what it found.
TYPES = $(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!
AND_TYPES = code=$$?; echo "mypy --strict ..."; wait $$types || code=1; cat $(VENV)/types.log; exit $$code

check: lint
	@echo "the quick tests ..."
	@$(TYPES); $(BIN)/pytest -n auto --dist worksteal -m "not slow and not browser"; $(AND_TYPES)

test: lint
	@echo "all tests ..."
	@$(TYPES); $(BIN)/pytest -n auto --dist worksteal -m "not network and not browser"; $(AND_TYPES)

test-browser: $(READY)
	@echo "pages in Chromium ..."
	@$(BIN)/pytest -n auto --dist worksteal -m browser

test-elsewhere: $(READY)
	@.ci/elsewhere

test-network: $(READY)
	@echo "a server and sites as real processes on loopback, one test after another (minutes each) ..."
	@$(BIN)/pytest -m network

docs: $(READY)
	@# Not --quiet: it would hide warnings from --strict too.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "The documentation is in site/index.html"

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
