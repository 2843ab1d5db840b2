# Two commands do all: `make diagnose` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
CKPT ?= fixtures/1digit-rotary2d-seed0
DIGITS ?= 100
BIN := $(VENV)/bin


.PHONY: diagnose cluster docs test lint bench faults readme clean
.DELETE_ON_ERROR:

diagnose: $(VENV)/.ready
	$(BIN)/leaksum diagnose $(CKPT) --digits $(DIGITS)

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python tests/benchmarks/bench_score.py
	$(BIN)/python tests/benchmarks/bench_long.py
	$(BIN)/python tests/benchmarks/bench_audit.py

faults: $(VENV)/.ready
	$(BIN)/python tests/faults.py

cluster: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	LEAKSUM_RAY=1 $(BIN)/python -m pytest tests/test_sweep.py -k ray_cluster

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

readme: $(VENV)/.ready
	$(BIN)/python tests/readme.py

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leaksum needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
