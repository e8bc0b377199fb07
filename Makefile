# make demo       set up what it needs in .venv, then train a plain GPT, a Nesterov one and our recipe: text, table, plot (minutes)
# make test       set up all of .venv, lint, type-check, run the fast tests (about ten minutes on 2 slow cores)
# make test-all   the complete set: also compiled models, every preset's full audit
# make test-shaken  the fast tests under what differs between machines: kernels, threads, order, data, versions of torch
# make test-gpu   CUDA tests, with a python that has pytest, xdist and a GPU build of torch (PYTHON=...)
# make test-gpu-all  those of every shape too
# make docs       the documentation site in site/, to be opened as a file; a broken link or equation is an error
# make audit      every preset's audit as a table
# make dist       what a release consists of, built in dist/ and tried in an environment of its own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
WORKERS ?= 2
# GPU tests spend their time compiling, on CPU cores; each worker holds a part of the GPU's memory.
GPU_WORKERS ?= $(shell n=$$(nproc); echo $$((n > 14 ? 14 : n)))
# The tests use tiny matrices: one thread per worker beats several fighting over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all test-shaken test-gpu test-gpu-all checked lint docs audit dist format clean setup
# Python compiles what is used when it is used: pip would compile everything, which takes as long as installing it.
export PYTHONDONTWRITEBYTECODE :=
# Two set-ups of one environment, never at once.
.NOTPARALLEL:

define install
	@echo "setting up $(VENV): stepformer[$(1)], which takes $(2) once everything is downloaded ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[$(1)]'
endef

define gpu_tests
	@mkdir -p build && touch build/begun
	PYTHONPATH=src OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "$(1)" -n $(GPU_WORKERS) --dist worksteal -rfEs tests
	$(PYTHON) tests/support/pipelines.py build/begun
endef

setup: $(STAMP)

# All of it: the demo needs nothing else.
$(STAMP): pyproject.toml constraints.txt
	$(call install,dev,minutes)
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,plot,a minute)
	@touch $(DEMO_STAMP)

demo: $(DEMO_STAMP)
	$(BIN)/stepformer demo

lint: $(STAMP)
	$(BIN)/ruff check src tests docs benchmarks
	$(BIN)/ruff format --check src tests docs benchmarks
	$(BIN)/mypy
	$(BIN)/python tests/support/house.py

# The site, which takes seconds, is built beside the type checker; tests/cli/test_site.py looks at it.
checked: $(STAMP)
	$(MAKE) --no-print-directory docs & site=$$!; $(MAKE) --no-print-directory lint && wait $$site

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: checked
	STEPFORMER_SITE=site $(PYTEST)

test-all: checked
	STEPFORMER_SITE=site $(PYTEST) -m "not gpu"

# ONLY="oldest-torch threads": some of the variations
test-shaken: $(STAMP)
	$(BIN)/python tests/support/shaken.py --workers $(WORKERS) $(ONLY)

test-gpu:
	$(call gpu_tests,gpu and not slow)

test-gpu-all:
	$(call gpu_tests,gpu)

audit: $(STAMP)
	$(BIN)/stepformer audit --all

dist: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python tests/support/released.py dist

format: $(STAMP)
	$(BIN)/ruff check --fix src tests docs benchmarks
	$(BIN)/ruff format src tests docs benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache site
