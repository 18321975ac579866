# Each target first makes .venv, or reuses it: all that the project needs, in the versions that constraints.txt fixes.
# Another Python than python3:   make setup PYTHON=python3.13   (afterwards plain `make` keeps it)

PYTHON ?= python3
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The stamp of a complete .venv carries the version of its Python: asking for another one makes .venv anew.
kept := $(if $(filter file,$(origin PYTHON)),$(wildcard .venv/installed-$(call version_of,.venv/bin/python)))
installed := $(or $(kept),.venv/installed-$(call version_of,$(PYTHON)))

.PHONY: setup smoke test lint

setup: $(installed)

smoke: setup
	@.venv/bin/python -m trainer train configs/cpu_smoke.yml

test: setup
	@.venv/bin/python -m pytest

lint: setup
	@.venv/bin/python -m ruff check --quiet
	@.venv/bin/python -m ruff format --check --quiet
	@.venv/bin/python -m pyright

$(installed): pyproject.toml constraints.txt
	@test -e $@ || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); this needs Python 3.11, 3.12 or 3.13:" \
	       "make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into .venv for Python $(patsubst .venv/installed-%,%,$@) (new: some 300 MB to download, a few minutes)"
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
