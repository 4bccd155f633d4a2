# `make train` and `make test` do all their set-up themselves; the second time they find it done. `make help` lists the rest.
#
# Packages come from requirements.lock, used as a constraints file: training installs the core packages only, linting and type
# checking add the extras `dev` and `web`, the tests also `torch`, and all get the exact versions named there. Node.js is one of
# the dev packages; what web/ needs comes from web/package-lock.json.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: help train test lint typecheck pytest web pyodide web-test acceptance benchmark-env wheel lock system-packages clean

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check install -qq --progress-bar off --constraint requirements.lock
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
TORCH := $(VENV)/.installed-torch
NODE_MODULES := web/node_modules/.installed
NPM := npm --prefix web
PAGE := web/dist/launch.html
PYODIDE := web/dist/pyodide/worker.js
RIVALS := .venv-benchmarks/.installed

# What a Debian machine needs beside Python packages. Chromium brings SwiftShader, the second Vulkan driver of the tests.
DEBIAN_PACKAGES := mesa-vulkan-drivers chromium

# wgpu wants a runtime folder to exist; a machine without a login session has none.
export XDG_RUNTIME_DIR := $(or $(XDG_RUNTIME_DIR),$(shell mkdir -p -m 700 "$${TMPDIR:-/tmp}/hybrid-runtime-$$(id -u)" && echo "$${TMPDIR:-/tmp}/hybrid-runtime-$$(id -u)"))

# Node.js and npm from the virtual environment.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

train: $(CORE) ## train a small model on the text of the Python standard library (ARGS="..." go to `hybrid train`)
	@$(PYTHON) -m hybrid train $(ARGS)

test: $(TORCH) system-packages ## lint, type-check and test everything but the long checks (ARGS="..." go to pytest)
	@$(MAKE) --no-print-directory lint typecheck
	@$(MAKE) --no-print-directory web-test
	@$(MAKE) --no-print-directory pytest

lint: $(DEV) $(NODE_MODULES) ## ruff, and biome for web/
	@$(PYTHON) -m ruff check .
	@$(NPM) run --silent lint

typecheck: $(DEV) $(NODE_MODULES) ## mypy, strict where pyproject.toml says so, and tsc for web/
	@$(PYTHON) -m mypy
	@$(NPM) run --silent typecheck

web-test: $(NODE_MODULES) ## the tests of web/ alone, in Node.js and Deno
	@$(NPM) run --silent test
	@$(NPM) run --silent test:deno

# NumPy's and torch's threads fight over the cores at the sizes of the tests: one each. Two files of tests run at a time; those
# that compare times come after, by themselves. What ARGS select runs as it would without make.
pytest: export OMP_NUM_THREADS := 1
pytest: export OPENBLAS_NUM_THREADS := 1
pytest: $(TORCH) $(PAGE) ## the tests alone
ifdef ARGS
	@$(PYTHON) -m pytest -m "not acceptance" $(ARGS)
else
	@$(PYTHON) -m pytest -m "not acceptance and not alone" --numprocesses 2 --dist loadfile --durations 40
	@$(PYTHON) -m pytest -m "alone and not acceptance"
endif

acceptance: $(TORCH) $(PAGE) $(PYODIDE) $(RIVALS) system-packages ## the long checks; writes benchmarks/results/*.json
	@failed=0; $(PYTHON) benchmarks/run_all.py || failed=1; $(PYTHON) -m pytest -m acceptance $(ARGS) || failed=1; exit $$failed

benchmark-env: $(RIVALS) ## the environment of the rivals that benchmarks/ measures (tinygrad with Dawn, jax-js, TensorFlow.js)

web: $(PAGE) ## build the page that trains in a tab (for `hybrid train --backend browser`)

pyodide: $(PYODIDE) ## build Python in the tab (19 MB in web/dist/pyodide), which compiles plans and runs scripts there

wheel: $(DEV) $(PAGE) ## build dist/*.whl, with shaders, schemas and the page inside
	@$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# Exact versions of the core, dev, web and torch sets and of the build backend, for whoever installs with this file as constraints.
# torch is pinned by hand: newer releases are installed only on purpose. "+cpu" and the like name a build, not a version.
lock: ## write requirements.lock anew from what pyproject.toml allows today
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(call find-python) && "$$python" -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq --progress-bar off \
		'.[dev,web,torch]' torch==2.13.0 hatchling editables && \
	{ echo "# Exact versions for constraints. Written by \`make lock\`; do not edit."; \
	  "$$folder/venv/bin/python" -m pip --disable-pip-version-check freeze --all --exclude hybrid --exclude pip \
	  | sed -E 's/(==[^+]*)\+.*/\1/' | grep -E '^[A-Za-z0-9_.-]+==' | sort -f; } > "$$folder/lock" && \
	cp "$$folder/lock" requirements.lock && wc -l requirements.lock

clean: ## remove the virtual environment and caches (runs stay)
	@rm -rf $(VENV) .venv-benchmarks build dist .mypy_cache .ruff_cache benchmarks/web/node_modules web/node_modules web/dist .pytest_cache .hypothesis

# Sets `python` to the first interpreter that is new enough.
define find-python
python=""; for candidate in python3 python3.11 python3.12 python3.13 python3.14; do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; done; \
if [ -z "$$python" ]; then echo "hybrid needs Python 3.11 or newer, and no python3 on PATH is: install one and try again" >&2; exit 2; fi
endef

# Debian keeps `venv` in a package of its own.
$(PYTHON):
	@$(call find-python); \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
		else echo "$$python cannot make virtual environments: apt-get install python3-venv (as root), then try again" >&2; exit 2; fi; fi; \
	echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)

# The build backend is installed first, from the lock: building in isolation would fetch an unlocked one.
$(CORE): pyproject.toml requirements.lock | $(PYTHON)
	@echo "installing the core packages"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(DEV): pyproject.toml requirements.lock | $(CORE)
	@echo "installing the dev packages"
	@$(PIP) --no-build-isolation --editable '.[dev,web]'
	@touch $@

$(TORCH): pyproject.toml requirements.lock | $(DEV)
	@echo "installing torch"
	@$(PIP) --no-build-isolation --editable '.[torch]'
	@touch $@

$(NODE_MODULES): web/package.json web/package-lock.json | $(DEV)
	@echo "installing the packages of web/"
	@$(NPM) ci --silent
	@touch $@

$(PAGE): $(NODE_MODULES) $(shell find web/runtime web/launch web/app web/pyodide -type f) web/build.js
	@echo "building the page"
	@$(NPM) run --silent build
	@touch $@

# After the page: both need the packages of web/.
$(PYODIDE): $(PAGE) $(shell find web/pyodide bridge/pyodide shaders python/hybrid -type f -not -name '*.pyc') web/build_pyodide.js
	@echo "building Python in the tab"
	@$(NPM) run --silent build:pyodide
	@touch $@

$(RIVALS): benchmarks/requirements.lock benchmarks/web/package-lock.json | $(NODE_MODULES)
	@echo "installing the rivals of the benchmarks"
	@npm --prefix benchmarks/web ci --silent
	@$(PYTHON) -m venv .venv-benchmarks
	@.venv-benchmarks/bin/python -m pip --disable-pip-version-check install -qq --progress-bar off -r $<
	@touch $@

system-packages:
	@missing=""; for package in $(DEBIAN_PACKAGES); do \
		[ "$$(dpkg-query -W -f '$${db:Status-Status}' $$package 2>/dev/null)" = installed ] || missing="$$missing $$package"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing$$missing"; apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
		else echo "not installed, and only root can:$$missing (tests that need them are listed as skipped)"; fi; fi
