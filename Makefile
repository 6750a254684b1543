# The two commands of the README are `make demo` and `make test`; `make help` lists the rest, `nox -l` every check.
PYTHON ?= python3.11
BIN := $(CURDIR)/.venv/bin
SOURCES := packages benchmarks tools tests examples noxfile.py
SUITES := tests h3-mapper h3-kernels h3-adapter-vllm h3-adapter-diffusers
PIP_QUIET := --disable-pip-version-check --quiet

.PHONY: demo test setup lint format typecheck unit parity docs clean help

demo: .demo/.installed  ## convert a small checkpoint through every layout and prove it, without torch
	.demo/bin/h3-mapper demo

.demo/.installed: packages/h3-mapper/pyproject.toml $(wildcard packages/h3-mapper/src/h3_mapper/*.py) $(wildcard packages/h3-mapper/src/h3_mapper/*/*.py)
	$(PYTHON) -m venv --clear .demo
	.demo/bin/pip install $(PIP_QUIET) ./packages/h3-mapper
	@touch $@

test: setup lint typecheck unit  ## install everything the tests need and pass them

setup: .boot/.installed  ## fill the wheelhouse, sync .venv, add the engines
	.boot/bin/python tools/workspace.py sync engines

.boot/.installed: requirements/boot.txt
	$(PYTHON) -m venv --clear .boot
	.boot/bin/pip install $(PIP_QUIET) --require-hashes -r requirements/boot.txt
	@touch $@

lint:  ## ruff, rules and format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format:  ## ruff, with fixes
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

typecheck:  ## mypy --strict on every package
	$(BIN)/mypy packages/h3-mapper/src packages/h3-kernels/src packages/h3-adapter-vllm/src packages/h3-adapter-diffusers/src

unit: $(SUITES:%=unit-%)  ## every CPU test, package by package

# One run per package: the engines and torch.distributed keep one global group per process, and packages must not share it.
unit-%:
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile -m "not gpu" $(if $(filter tests,$*),tests,packages/$*)

parity: setup  ## the same tiny weights through both real engines, with and without the adapters
	OMP_NUM_THREADS=1 $(BIN)/python tools/parity.py

docs: setup  ## build the site of docs/, strictly
	$(BIN)/mkdocs build --strict

clean:  ## remove what the above made
	rm -rf .boot .demo .venv .wheelhouse .nox site dist

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
