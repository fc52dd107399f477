# make run    the on/off matrix: sets up .venv, writes out/matrix.json
# make test   the harness's own tests and every regression
# make lint   ruff and mypy
# make audit  bandit on the sources, pip-audit on what is installed, which asks the network
PYTHON ?= python3
VENV   ?= .venv
# Without a GPU the versions are pinned; with one, pip keeps the torch that fits its driver. The other file that
# CONSTRAINTS may name, constraints-lowest.txt, has the lowest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints-cpu.txt
comma   := ,
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
SETUP   := $(if $(filter-out 0,$(HAS_GPU)),-e '.[dev$(comma)gpu]',-c $(CONSTRAINTS) -e '.[dev]')
BIN     := $(VENV)/bin
JOBS    ?= auto

.PHONY: run test lint audit clean
run: $(VENV)/ready
	$(BIN)/unfix run --json out/matrix.json --jobs $(JOBS)

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In an environment of their own: what they need is no part of what they look at.
audit: $(VENV)/ready
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet 'bandit[toml]>=1.8' 'pip-audit>=2.7'
	$(VENV)-audit/bin/bandit --quiet --configfile pyproject.toml --recursive harness kernels regressions
	$(VENV)-audit/bin/pip-audit --progress-spinner off --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "unfix needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	@echo 'unfix: setting up $(VENV), once; this takes a minute or two' >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(SETUP)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-audit out build *.egg-info
