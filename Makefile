# Needs Python >= 3.11 and nothing else; everything is installed into $(VENV) from constraints.txt.
#   make demo       search, train and compare on 8 fake CPU devices
#   make test       linters, types, import floors, tests
# A second interpreter: make suite VENV=.venv-next PYTHON=python3.13

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-targets test-packages canary check suite package bench bench-accuracy fmt clean

help:
	@echo "make demo | test | test-all | test-targets | test-packages | canary | check | suite | package | bench | bench-accuracy | fmt | clean   (VENV=$(VENV) PYTHON=$(PYTHON))"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: autoshard needs 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/transformer.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One file stays on one worker (tests/conftest.py), so that what a module compiles once serves all its tests.
suite: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test: check suite

test-all: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not bench and not targets and not packages" $(ARGS)

# Downloads 640 MB: the real TPU and GPU compilers, which need neither a TPU nor a GPU. libtpu is under Google Cloud's
# terms. In an environment of its own, because jax looks for a TPU wherever libtpu is installed.
test-targets:
	$(MAKE) install VENV=.venv-targets
	.venv-targets/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tpu,gpu]'
	JAX_PLATFORMS=cpu .venv-targets/bin/python -m pytest -m targets --dist loadfile -n $(WORKERS) tests/targets $(ARGS)

# Programs on model code that nobody here wrote, against what experts write: docs in tests/packages/. Not in CI.
# WRITE=1 keeps the table in tests/golden/packages.md. Most of a run is compiling: LLVM's optimisations are left out.
PACKAGES := google-tunix 'transformers<5' equimo dm-haiku jraph diffrax numpyro blackjax brax
test-packages:
	$(MAKE) install VENV=.venv-packages
	.venv-packages/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --constraint tests/packages/constraints.txt $(PACKAGES)
	JAX_PLATFORMS=cpu XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" $(if $(WRITE),PACKAGES_TABLE=write) .venv-packages/bin/python -m pytest -m packages -n 0 -p no:cacheprovider tests/packages $(ARGS)

# The main job on the newest jax that the registry has for this interpreter, in an environment of its own, with nothing
# pinned: what breaks here will break for users next. CANARY_JAX=jax==0.11.2 tries another release.
CANARY_JAX ?= jax
canary:
	$(PYTHON) -m venv --clear .venv-canary
	.venv-canary/bin/python -m pip install --quiet --disable-pip-version-check --upgrade '$(CANARY_JAX)' optax pytest pytest-xdist hypothesis --editable .
	.venv-canary/bin/python -c 'import jax; print("canary: jax", jax.__version__)'
	.venv-canary/bin/python examples/transformer.py
	.venv-canary/bin/python -m pytest -q -p no:cacheprovider tests/tracing/test_needed_names.py tests/tracing/test_trace.py tests/layout/test_constraints.py tests/shardy $(ARGS)

# Builds the wheel and the source distribution, installs each elsewhere, and runs the README's example from it.
package: $(STAMP)
	$(BIN)/python -m tests.package

bench: $(STAMP)
	$(BIN)/python -m pytest -m bench -s $(ARGS)

# Hours on 2 cores when everything is compiled anew; the cache makes it resumable. ARGS="--models gpt2 --meshes 4x2".
bench-accuracy: $(STAMP)
	$(BIN)/python -m tests.benchmarks.accuracy --cache accuracy-cache.jsonl --out accuracy.json $(ARGS)

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-next .venv-targets .venv-packages .venv-canary build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
