# Everything that a developer or CI does, by name. A fresh clone needs Python 3.11 or newer and make; the first call makes
# .venv and installs into it, later ones start at once. PYTHON=/path/to/python chooses another interpreter, WORKERS=8 how
# many processes test at a time (a file of tests stays in one: it shares its servers).

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
WORKERS ?= 2
PYTEST := -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WHEEL_PIP := build/venv/bin/python -m pip --disable-pip-version-check --quiet

# By name, because basedpyright and ty do not follow the links in llmtrack/.
SOURCES := llmtrack/*.py llmtrack/writer llmtrack/query llmtrack/sync llmtrack/examples \
	tests benchmarks hatch_build.py

.PHONY: help demo test check lint types imports pytest soak bench docs format build clean

help: ## say what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

demo: .venv/.demo ## train a tiny model, kill it, resume it, sync it, and show what was kept
	$(BIN)/llmtrack demo

test: check pytest ## everything that must hold: check, then the tests

check: lint types imports ## everything that needs no test run

lint: .venv/.dev ## ruff: rules and layout
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.dev ## mypy, basedpyright, ty
	$(BIN)/mypy
	$(BIN)/basedpyright $(SOURCES)
	$(BIN)/ty check --error-on-warning $(SOURCES)

imports: .venv/.dev ## import-linter: sync -> query -> writer, and never back
	$(BIN)/lint-imports --no-logo

pytest: .venv/.dev ## the tests alone, with branch coverage
	$(BIN)/python $(PYTEST) -m 'not soak' --cov --cov-report=term

soak: .venv/.dev ## the tests that take minutes
	$(BIN)/python -m pytest -m soak

bench: .venv-bench/.made ## the log beside today's trackers, measured on this machine: about an hour
	.venv-bench/bin/python benchmarks/bench_log.py
	.venv-bench/bin/python benchmarks/bench_append.py
	.venv-bench/bin/python benchmarks/bench_query.py

docs: .venv/.dev ## write docs/CLI.md: what the commands say of themselves
	$(BIN)/python -m tests.cli_page

format: .venv/.dev ## lay out the code, and mend what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

build: .venv/.dev ## wheel and source archive; then the wheel installed and tested away from this checkout
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m venv build/venv
	$(WHEEL_PIP) install dist/*.whl
	build/venv/bin/python tests/packaging/base_install.py
	$(WHEEL_PIP) install "$$(echo dist/*.whl)[mlflow]" hypothesis numpy psutil pytest pytest-xdist
	mkdir build/away && cp -R pyproject.toml tests build/away
	cd build/away && ../venv/bin/python $(PYTEST) $$(grep -LE '^(import|from) [a-z.]*torch' tests/unit/test_*.py)

clean: ## remove what was built and installed here
	rm -rf .venv .venv-bench build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*

.venv/.made: # no prerequisites: once made, it stays
	@test -n "$(PYTHON)" || { echo "llmtrack needs Python 3.11 or newer, and found none (tried python3.11 to python3.14," \
		"python3 and python)."; echo "  try: make PYTHON=/path/to/python3.11"; exit 1; } >&2
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: .venv/.made pyproject.toml
	@echo "Installing llmtrack and what the demo needs into .venv: a minute or two, once."
	$(PIP) install --editable '.[demo]'
	@touch $@

.venv/.dev: .venv/.demo pyproject.toml
	@echo "Installing the tools of a developer into .venv: a minute, once."
	$(PIP) install --editable '.[dev]'
	@touch $@

.venv-bench/.made: .venv/.made benchmarks/requirements.txt pyproject.toml # apart from .venv: trackers pin what others want newer
	@echo "Installing the trackers that the log is compared with into .venv-bench: minutes, once."
	$(BIN)/python -m venv .venv-bench
	.venv-bench/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[query]' --requirement benchmarks/requirements.txt
	@touch $@
