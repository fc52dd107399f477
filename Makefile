# make run    the on/off matrix: sets up .venv, writes out/matrix.json
# make test   the harness's own tests and every regression
# make lint   ruff and mypy
PYTHON ?= python3
VENV   ?= .venv
# Without a GPU the versions are pinned to CPU builds; with one, pip keeps the torch that fits its driver.
comma   := ,
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
SETUP   := $(if $(filter-out 0,$(HAS_GPU)),-e '.[dev$(comma)gpu]',-c constraints-cpu.txt -e '.[dev]')
BIN     := $(VENV)/bin
JOBS    ?= auto

.PHONY: run test lint clean
run: $(VENV)/ready
	$(BIN)/unfix run --json out/matrix.json --jobs $(JOBS)

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "unfix needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	@echo 'unfix: setting up $(VENV), once; this takes a minute or two' >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(SETUP)
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
