# `make` lists the targets. Both `make train` and `make test` need only Python 3.11, 3.12 or 3.13 (with venv and pip) and
# make.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
STORES_STAMP := $(VENV)/.installed_stores
DOCS_STAMP := $(VENV)/.installed_docs
PICTURES_STAMP := $(VENV)/.installed_pictures
# PyTorch crashes next to TensorFlow (docs/limits.md), so it has an environment of its own.
INTEROP_VENV := .venv-interop
INTEROP_PY := $(INTEROP_VENV)/bin/python
INTEROP_STAMP := $(INTEROP_VENV)/.installed
RUN ?= runs/keyword_cloze
RECIPE ?= recipes/keyword_cloze.gin
# Each worker of the tests takes up to 3 GB and has 8 virtual devices; more than cores do not help.
WORKERS ?= 2
# Emulators of object stores, and trackers: `no` goes without them.
STORES ?= yes
ARGS ?=
# What `make test-docs` runs; default: all pages.
PAGES ?=
# The kit for a GPU (benchmarks/gpu): wheels of what JAX does not bring, and sizes, `tiny` for a rehearsal on a CPU.
GPU_VENV := .venv-gpu
GPU_PY := $(GPU_VENV)/bin/python
GPU_STAMP := $(GPU_VENV)/.installed
GPU_WHEELS := build/gpu-wheels
SIZES ?= real

# `make PYTHON=/path/to/python ...`, else the first interpreter that is 3.11 to 3.13.
ifdef PYTHON
  # Some shells leave the tilde of PYTHON=~/python to make.
  PYTHONS := "$(patsubst ~/%,$(HOME)/%,$(PYTHON))"
  NO_PYTHON := PYTHON must be Python 3.11, 3.12 or 3.13, got $(PYTHON).
else
  PYTHONS := python3 python3.13 python3.12 python3.11 python
  NO_PYTHON := No Python 3.11, 3.12 or 3.13 found.
endif
FIND_PYTHON := for p in $(PYTHONS); do \
  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo "$$p"; break; }; done

# TensorFlow has no wheel for every platform: elsewhere the same data comes from the source that needs none of it.
PLATFORM := $(shell uname -sm)
ifeq ($(PLATFORM),Linux x86_64)
  DATA_SOURCE ?= seqio
else
  DATA_SOURCE ?= builtin
endif

# Python keeps the byte code of the modules that it imports. pip would compile all 22,000 files, which doubles the time
# of the installation.
unexport PYTHONDONTWRITEBYTECODE

T5X ?=

# What `make lint` and `make format` read.
CODE := t5x_lite moe tests benchmarks scripts docs setup.py README.md CONTRIBUTING.md

# A first answer in a minute: the arithmetic and the rules of the repository, without programs and stores.
FAST_TESTS := \
  tests/configuration/test_validation.py \
  tests/data/sources/test_table.py \
  tests/data/batches/test_streams.py \
  tests/data/text/test_sources.py \
  tests/data/test_vocabularies.py \
  tests/decoding/test_topk.py \
  tests/evaluation/test_batching.py \
  tests/evaluation/test_config.py \
  tests/layers/test_attention_kernels.py \
  tests/layers/test_dense.py \
  tests/moe/routing/test_golden.py \
  tests/moe/test_mesh.py \
  tests/moe/test_partitioner.py \
  tests/moe/test_partitioner_golden.py \
  tests/mutation/test_table.py \
  tests/optimizers/axes/test_rules.py \
  tests/optimizers/optax_adapter/test_option_checks.py \
  tests/partitioning/test_explain.py \
  tests/partitioning/test_golden.py \
  tests/partitioning/test_layout.py \
  tests/partitioning/test_mesh.py \
  tests/partitioning/test_model_info.py \
  tests/partitioning/test_param_axes.py \
  tests/partitioning/test_partitioner.py \
  tests/partitioning/test_rules.py \
  tests/partitioning/test_tiles.py \
  tests/repository/test_layering.py \
  tests/repository/test_layout.py \
  tests/repository/test_mirror.py \
  tests/repository/test_outside.py \
  tests/test_checks.py \
  tests/command_line/test_flags.py \
  tests/test_errors.py \
  tests/test_formatting.py \
  tests/test_losses.py \
  tests/test_metrics.py \
  tests/test_schedules.py \
  tests/test_train_golden.py \
  tests/test_train_state.py

BENCHMARKS := \
  bench_checkpoint \
  bench_input \
  bench_startup \
  bench_train_step \
  convert_memory \
  decode \
  expert_partitions \
  faults \
  function_cloze \
  large_vocabulary \
  long_inputs \
  lora \
  mbr \
  moe \
  object_stores \
  observation \
  optimizers \
  own_files \
  profile_step \
  remat \
  safety \
  shampoo \
  trackers

.PHONY: help train test test-fast test-full test-interop test-t5x test-docs lint format types mutants soak bench gpu gpu-wheels reference docs pictures dist locks clean

help: ## list the targets
	@echo 'usage: make TARGET [PYTHON=/path/to/python3.13] [RUN=runs/name] [RECIPE=recipes/file.gin] [ARGS="--gin.TRAIN_STEPS=1000"]'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(STAMP) ## train the embedded recipe (about 2 minutes on 2 cores, set-up included); resumes a stopped run
	$(PY) -m t5x_lite train --gin_file=$(RECIPE) --gin.MODEL_DIR=$(RUN) --gin.DATA_SOURCE=$(DATA_SOURCE) $(ARGS)

test: $(STAMP) $(STORES_STAMP) lint ## run the linter and the test suite on 8 virtual CPU devices
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-fast: $(STAMP) lint ## run the linter and tests that answer within a minute
	$(PY) -m pytest -n $(WORKERS) -q --durations=0 --durations-min=5 $(FAST_TESTS) $(ARGS)

test-full: $(STAMP) $(STORES_STAMP) ## run the test suite and the long tests: many random kills, whole recipes
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m '' $(ARGS)

test-interop: $(INTEROP_STAMP) ## compare the recorded results of PyTorch, transformers, PEFT and CTranslate2 with the libraries
	$(INTEROP_PY) -m tests.interop.record $(ARGS)

test-t5x: $(STAMP) ## T5X=PATH: T5X's gin files and own tests from a checkout, with t5x_lite's objects (2 minutes)
	$(PY) -m tests.t5x '$(T5X)'

test-docs: $(STORES_STAMP) train ## run every command of README and docs, or of PAGES, in copies of the checkout (at most 15 minutes)
	$(PY) -m tests.repository.docs_commands $(PAGES)

mutants: $(STAMP) ## apply small changes to a copy of the code, each of which a test must notice (slow)
	$(PY) -m tests.mutation --jobs $(WORKERS) $(ARGS)

soak: $(STAMP) ## 2,000 small steps under 30 random kills, signals and other faults, compared bitwise (about 10 minutes)
	XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu $(PY) -m tests.soak $(ARGS)

bench: $(STAMP) ## run every benchmark and print its table (nothing else should run meanwhile)
	for name in $(BENCHMARKS); do $(PY) benchmarks/$$name.py || exit 1; done

gpu: $(GPU_STAMP) ## measure and check on a GPU in 9 minutes, without network; SIZES=tiny rehearses on a CPU
	PYTHONPATH='$(CURDIR)' $(GPU_PY) -m benchmarks.gpu --sizes=$(SIZES) $(ARGS)

gpu-wheels: ## download what `make gpu` installs to build/gpu-wheels (36 MB), for Python 3.12 on Linux x86-64
	@mkdir -p $(GPU_WHEELS)
	@python=$$($(FIND_PYTHON)); \
	"$${python:?$(NO_PYTHON)}" -m $(DOWNLOAD) --require-hashes -d $(GPU_WHEELS) -r requirements/gpu-wheels.txt

lint: $(STAMP) ## check the rules of pyproject.toml and the format (seconds)
	$(VENV)/bin/ruff check $(CODE)
	@# Texts are read and written in UTF-8, whatever the locale. `--preview` only here: it changes other rules.
	$(VENV)/bin/ruff check --quiet --preview --select PLW1514 $(CODE)
	$(VENV)/bin/ruff format --check --quiet $(CODE) || { echo 'Run `make format`.' >&2; exit 1; }

format: $(STAMP) ## sort the imports and format the code
	$(VENV)/bin/ruff check --quiet --select I --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

types: $(STAMP) $(STORES_STAMP) ## check the types of the packages (a minute)
	$(VENV)/bin/pyright

reference: $(STAMP) ## write docs/reference from the code (flags, macros, API), and llms.txt (seconds)
	JAX_PLATFORMS=cpu $(PY) -m docs.make_reference

docs: $(DOCS_STAMP) ## build the documentation as HTML in docs/_build; executes its notebooks (5 minutes)
	$(PY) -m sphinx -q -W --keep-going -b html $(ARGS) docs docs/_build

pictures: train $(PICTURES_STAMP) ## draw docs/images from today's code; needs Chromium (10 minutes)
	$(PY) docs/pictures.py

# What `make locks` tells uv: wheels for Linux x86-64.
UV ?= uv
COMPILE := $(UV) pip compile -q --upgrade --python-platform x86_64-unknown-linux-gnu --no-annotate --no-header

# Wheels of Python 3.12 on Linux x86-64, for any Python that downloads them.
MANYLINUX := $(patsubst %,--platform manylinux_2_%_x86_64,28 27 17 12 5)
DOWNLOAD := pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp $(MANYLINUX) --platform manylinux2014_x86_64 --platform manylinux1_x86_64

locks: ## resolve requirements/lock-*.txt and gpu-wheels.txt again; needs uv
	COMPILE='$(COMPILE)' DOWNLOAD="$$($(FIND_PYTHON)) -m $(DOWNLOAD)" sh requirements/make_locks.sh

dist: $(STAMP) ## build the source distribution and the wheel in dist/
	rm -rf dist build/lib build/bdist.* *.egg-info
	mkdir dist
	$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"

# Most of the time of tests is compilation: compiled programs stay with the environment (tests/conftest.py).
test test-fast test-full: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(VENV)/compiled

clean: ## remove the environment and build products (never runs/)
	rm -rf $(VENV) $(INTEROP_VENV) $(GPU_VENV) build dist *.egg-info docs/_build docs/jupyter_execute .pytest_cache

# Two targets must not install into the environment at once.
.NOTPARALLEL:

# The environments of another Python than the named one, and of a checkout that was moved, are made again.
VERSION := -c 'import sys; print(sys.version_info[:2])'
ifdef PYTHON
  NAMED := $(shell { $(PYTHONS) $(VERSION); } 2>/dev/null)
  ifneq ($(NAMED),$(shell { $(PY) $(VERSION); } 2>/dev/null))
    $(STAMP): outdated
  endif
  ifneq ($(NAMED),$(shell { $(INTEROP_PY) $(VERSION); } 2>/dev/null))
    $(INTEROP_STAMP): outdated
  endif
endif
MOVED := $(shell test -s $(STAMP) && ! grep -qxF '$(CURDIR)' $(STAMP) && echo moved)
ifdef MOVED
  $(STAMP): outdated
endif
.PHONY: outdated

$(STAMP): setup.py pyproject.toml $(wildcard requirements/lock-3.*.txt)
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
	  echo '$(NO_PYTHON) Install one, or name it: make PYTHON=/path/to/python3.13 train' >&2; exit 2; fi; \
	lock=requirements/lock-$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	echo "Making $(VENV) with $$("$$python" --version) from $$lock (about a minute)"; \
	set -e; "$$python" -m venv --clear $(VENV); \
	if [ '$(PLATFORM)' = 'Linux x86_64' ]; then \
	  $(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps -r $$lock; \
	  $(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	else \
	  $(PY) -m pip install -q --no-compile --disable-pip-version-check -c $$lock -e '.[test]'; \
	fi
	@echo '$(CURDIR)' > $(STAMP)

# Where this fails, the tests of object stores and of trackers are skipped and the next `make test` tries again.
$(STORES_STAMP): $(STAMP) requirements/lock-stores.txt
	@if [ '$(STORES)' = no ]; then \
	  echo 'STORES=no: the tests of object stores and trackers are skipped where these are not installed.'; exit 0; fi; \
	echo 'Adding emulators of object stores, and trackers (250 MB; `make STORES=no $(MAKECMDGOALS)` goes without them)'; \
	if $(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps -r requirements/lock-stores.txt; \
	  then touch $@; else \
	  echo 'They could not be installed: the tests of object stores and trackers are skipped.' >&2; test -z "$$CI"; fi

$(DOCS_STAMP): $(STAMP) requirements/lock-docs.txt
	$(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps -r requirements/lock-docs.txt
	@touch $@

$(PICTURES_STAMP): $(STAMP) requirements/lock-pictures.txt
	$(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps -r requirements/lock-pictures.txt
	@touch $@

# With dependencies, which differ between CPU and CUDA builds of torch. TensorFlow is not among them.
$(INTEROP_STAMP): setup.py requirements/lock-interop.txt $(wildcard requirements/lock-3.*.txt)
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
	  echo '$(NO_PYTHON) Install one, or name it: make PYTHON=/path/to/python3.13 test-interop' >&2; exit 2; fi; \
	lock=requirements/lock-$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	echo "Making $(INTEROP_VENV) with $$("$$python" --version), PyTorch, transformers, PEFT and CTranslate2 (1.7 GB; 5 GB with a CUDA build)"; \
	set -e; "$$python" -m venv --clear $(INTEROP_VENV); \
	$(INTEROP_PY) -m pip install -q --no-compile --disable-pip-version-check -c $$lock -c requirements/lock-interop.txt \
	  -e '.[test-interop]'
	@touch $@

# An environment that sees the packages of the Python that has JAX, which may be in an environment itself: then
# --system-site-packages shows those of another Python.
$(GPU_STAMP): requirements/gpu-wheels.txt
	@python=$$($(FIND_PYTHON)); \
	packages=$$("$$python" -c 'import sys, jax, pathlib; assert sys.version_info[:2] == (3, 12); \
	assert jax.__version_info__ >= (0, 11); print(pathlib.Path(jax.__file__).parents[1])'); \
	if [ -z "$$packages" ]; then \
	  echo 'make gpu needs Python 3.12 with JAX 0.11 or newer: make PYTHON=/path/to/python3.12 gpu' >&2; exit 2; fi; \
	if [ ! -d $(GPU_WHEELS) ]; then \
	  echo 'Run `make gpu-wheels` where there is a network, and bring $(GPU_WHEELS).' >&2; exit 2; fi; \
	set -e; "$$python" -m venv --clear --system-site-packages --without-pip $(GPU_VENV); \
	echo "$$packages" > $$(ls -d $(GPU_VENV)/lib/python3.12/site-packages)/packages_of_jax.pth; \
	"$$python" -m pip --python $(GPU_PY) install -q --no-compile --disable-pip-version-check --no-deps --no-index \
	  --ignore-installed --require-hashes --find-links $(GPU_WHEELS) -r requirements/gpu-wheels.txt
	@echo '$(CURDIR)' > $@
