# Two commands from a fresh clone, with Python 3.11+, pip and make: `make demo` and `make test`.
# Each sets up .venv here first, once. `make help` lists the others.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: help demo test quick lint types coverage bench lock check-release clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' Makefile

demo: .venv/demo  ## train a small model on the standard library's source, 2 minutes on 2 cores
	$(BIN)/python examples/fineweb_gpt2.py --demo

test: .venv/dev lint types  ## everything CI runs
	$(BIN)/python -m pytest -n auto

quick: .venv/dev  ## the tests but for the slow ones, under a minute on 2 cores
	$(BIN)/python -m pytest -n auto -m "not slow"

lint: .venv/dev  ## ruff, its formatting, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: .venv/dev  ## mypy, strict
	$(BIN)/mypy

coverage: .venv/dev  ## the lines and branches that the tests do not run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n auto --timeout 300
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: .venv/bench  ## measure, write benchmarks/results/*.json, and the README's table and plots from them
	$(BIN)/python -m benchmarks all
	$(BIN)/python -m benchmarks report

lock: .venv/release  ## the newest versions of everything that development needs, into requirements-dev.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-emit-index-url --custom-compile-command "make lock" \
		--extra examples --group test --output-file requirements-dev.txt pyproject.toml

check-release: .venv/release  ## build wheel and sdist, and use the wheel with the lowest and the newest dependencies
	$(BIN)/python .ci/check_release.py

clean:
	rm -rf .venv dist

.venv/pip:
	@test -n "$(PYTHON)" || { echo "tokenloader needs Python 3.11 or newer; none is on the PATH" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

.venv/demo: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	touch $@

.venv/dev: .venv/pip pyproject.toml requirements-dev.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

.venv/release: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --group release
	touch $@

# The peers are large (PyTorch); where they do not install, the comparison goes on without, and says so.
.venv/bench: .venv/dev
	$(BIN)/python -m pip install --quiet --group bench || echo "without the peers of the bench group" >&2
	touch $@
