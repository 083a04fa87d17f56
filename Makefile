# Two commands from a fresh clone, with Python 3.11+, pip and make: `make demo` and `make test`.
# Each sets up .venv here first, once.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: demo test lint types bench clean

demo: .venv/demo  ## train a small model on the standard library's source, 2 minutes on 2 cores
	$(BIN)/python examples/fineweb_gpt2.py --demo

test: .venv/dev lint types  ## everything CI runs
	$(BIN)/python -m pytest -n auto

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: .venv/dev
	$(BIN)/mypy

bench: .venv/bench  ## measure, write benchmarks/results/*.json, and the README's table and plots from them
	$(BIN)/python -m benchmarks all
	$(BIN)/python -m benchmarks report

clean:
	rm -rf .venv

.venv/pip:
	@test -n "$(PYTHON)" || { echo "tokenloader needs Python 3.11 or newer; none is on the PATH" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

.venv/demo: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	touch $@

.venv/dev: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[examples]' --group test
	touch $@

# The peers are large (PyTorch); where they do not install, the comparison goes on without, and says so.
.venv/bench: .venv/dev
	$(BIN)/python -m pip install --quiet --group bench || echo "without the peers of the bench group" >&2
	touch $@
