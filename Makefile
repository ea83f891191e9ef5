# Two commands on a fresh machine: `make train` and `make test`. Each installs what is pinned, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS   ?=
TORCH  ?= 2.11.0
OTHER  := $(VENV)/torch-$(TORCH)
# Tests run beside each other, one thread each: small models gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help train test test-slow test-torch support lint docs links bench clean

help:
	@echo 'make train [ARGS="optimizer.lr=0.01 seed=3"]   install once, then run train.py with these overrides'
	@echo 'make test                                      install once, then lint, type check and tests'
	@echo 'make test-slow                                 the tests that take longer'
	@echo 'make test-torch TORCH=2.11.0 [ARGS=tests/flow]  the tests with another version of torch'
	@echo 'make support                                   write what works where, docs/support.md, from the tests'
	@echo 'make docs                                      build the documentation, to open at build/docs/index.html'
	@echo 'make links                                     follow the links of the documentation to other sites'
	@echo 'make bench ARGS=import                         one benchmark of scripts/bench.py'

train: $(VENV)/.train-installed
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/.test-installed lint
	$(PYTEST) --numprocesses=3 --dist=worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.test-installed
	$(PYTEST) --numprocesses=2 --dist=loadgroup -m slow $(ARGS)

test-torch: $(OTHER)/.installed
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest --numprocesses=3 --dist=worksteal -m "not slow" $(ARGS)

# Tests that fail leave the table, tests that pass enter it.
support: $(VENV)/.test-installed
	$(PYTEST) --numprocesses=2 --dist=loadgroup -m supports --support-matrix=docs/support.md $(ARGS)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors: a broken link, a page in no table of contents, a docstring that does not parse.
docs: $(VENV)/.test-installed
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs

# Needs the internet, so no test does it.
links: $(VENV)/.test-installed
	$(BIN)/python -m sphinx --quiet --builder linkcheck --define nb_execution_mode=off docs build/links

bench: $(VENV)/.test-installed
	$(BIN)/python scripts/bench.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "gradpolicy needs Python 3.11 to 3.13; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch first, so that nothing that comes after can choose another one.
$(VENV)/.train-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once) ..."
	$(PIP) torch
	$(PIP) --editable '.[train]'
	@touch $@

# zennit, a peer that some tests compare with, asks for torchvision, which breaks the CPU build of torch.
$(VENV)/.test-installed: $(VENV)/.train-installed
	@echo "Installing what the tests need (once) ..."
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps zennit
	@touch $@

# Another torch, and for all else the packages of the environment above.
$(OTHER)/.installed: | $(VENV)/.test-installed
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$($(OTHER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/others.pth
	@touch $@
