# Each target first makes .venv, or reuses it: all that the project needs, in the versions that constraints.txt fixes.
# With another Python than python3:   make setup PYTHON=python3.13   (afterwards plain `make` keeps it)

PYTHON ?= python3
supported := 3.11 3.12 3.13
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# The stamp of a complete .venv carries the version of its Python: naming another PYTHON makes .venv anew.
kept := $(if $(filter file,$(origin PYTHON)),$(wildcard .venv/installed-$(call version_of,.venv/bin/python)))
version := $(if $(kept),$(kept:.venv/installed-%=%),$(call version_of,$(PYTHON)))
installed := .venv/installed-$(version)
refusal = $(PYTHON) is $(or $(version:%=Python %),not found); Python 3.11, 3.12 or 3.13 is needed, \
  as in "make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"

compiler := .venv/libtpu-$(version)

.PHONY: setup smoke test lint pod

setup: $(installed)

smoke: setup
	@.venv/bin/python -m trainer train configs/cpu_smoke.yml

test: setup
	@.venv/bin/python -m pytest

lint: setup
	@.venv/bin/python -m ruff check --quiet
	@.venv/bin/python -m ruff format --check --quiet
	@.venv/bin/python -m pyright

# The dry run of the pod: the step of 128 chips, compiled on this machine. About 12 GiB of memory and 10 minutes.
pod: $(compiler)
	@.venv/bin/python -m trainer compile configs/v6e128_flash_lora_seq16384.yml

$(compiler): $(installed)
	@echo "Adding libtpu, the TPU's compiler, to .venv: 700 MB of disk"
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[tpu]'
	@touch $@

$(installed): pyproject.toml constraints.txt
	$(if $(filter $(supported),$(version)),,$(error $(refusal)))
	@if test -e $@; then echo "Updating .venv (Python $(version))"; else \
	  echo "Making .venv with Python $(version): about 300 MB to download, a minute or a few"; \
	  $(PYTHON) -m venv --clear .venv; fi
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
