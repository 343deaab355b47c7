# Every target makes the environment it needs, from nothing. Works with GNU make 3.81.
#
#   VENV=path      where the environment goes (default .venv)
#   PYTHON=path    the interpreter to make it with (default: the first suitable one found)
#   WORKERS=n      how many processes run the tests (default auto: one per core)
#   ARGS='...'     passed on to pytest, the demo or the benchmarks

SHELL = /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo demo-processes quick test test-full test-latest test-tpu test-gpu gpu gpu-carry check bench bench-peers docs clean

VENV ?= .venv
VENV_LATEST ?= $(VENV)-latest
VENV_TPU ?= $(VENV)-tpu
VENV_GPU ?= $(VENV)-gpu
CARRIED := .cache/gpu-carried
VENV_PEERS ?= $(VENV)-peers
PYTHON ?=
WORKERS ?= auto
ARGS ?=
export PYTHON
# Also where the shell says not to: dozens of processes that tests start share the bytecode.
export PYTHONDONTWRITEBYTECODE :=

ready = sh tools/environment.sh
bin = $(VENV)/bin
pytest = -m pytest -q -n $(WORKERS) --dist worksteal
# Compiling is most of what the tests do, and each program runs once or twice. $(1) has the
# interpreter. A cache of programs on disk costs as much as it saves: it has one in seven.
unoptimized = XLA_FLAGS="$$XLA_FLAGS `$(1)/python tools/xla_flags.py`"
rooms = $(addprefix tests/,resolution strategy trees manager processes)

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read -r name what; do printf '  make %-15s %s\n' "$$name" "$$what"; done

demo: ## train a small decoder under four strategy files, serve it under a fifth
	@$(ready) $(VENV) demo
	@$(bin)/python examples/demo.py $(ARGS)

demo-processes: ## train in two and in four local processes, kill one, go on with fewer, serve
	@$(ready) $(VENV) test
	@$(bin)/python examples/several_processes.py $(ARGS)

quick: ## lint, types, and the tests of five rooms, such as resolution: under a minute
	@$(ready) $(VENV) dev
	@$(bin)/ruff format --quiet --check .
	@$(bin)/ruff check --quiet .
	@$(bin)/python -m mypy & types=$$!; \
	  $(call unoptimized,$(bin)) $(bin)/python $(pytest) $(rooms) $(ARGS); tests=$$?; \
	  wait $$types && exit $$tests

test: ## run the tests: each behavior at least once
	@$(ready) $(VENV) test
	@$(call unoptimized,$(bin)) $(bin)/python $(pytest) $(ARGS)

test-full: ## run all tests but those marked product: every mesh, dtype, cache and page, for an hour
	@$(ready) $(VENV) test
	@$(call unoptimized,$(bin)) $(bin)/python $(pytest) -m "not product" $(ARGS)

test-latest: ## run the tests on the newest JAX (Python 3.12 or newer); looks for a newer one once a day
	@$(ready) $(VENV_LATEST) test 3.12 `date +%Y-%m-%d`
	@$(VENV_LATEST)/bin/python -c 'import jax, sys; print("JAX", jax.__version__, "on Python", sys.version.split()[0])'
	@$(call unoptimized,$(VENV_LATEST)/bin) $(VENV_LATEST)/bin/python $(pytest) $(ARGS)

test-tpu: ## compile for eight TPUs that are not there: kernels, memory, what is sent; libtpu has 200 MB
	@$(ready) $(VENV_TPU) test,tpu-aot
	@$(VENV_TPU)/bin/python -m pytest -q -m tpu $(ARGS)

test-gpu: ## compile for GPUs that are not there: what is sent, memory; the wheels have 200 MB
	@$(ready) $(VENV_GPU) test
	@$(VENV_GPU)/bin/python -m pip install -qq --no-deps `$(VENV_GPU)/bin/python tools/cuda_plugin.py`
	@$(VENV_GPU)/bin/python -m pytest -q -m gpu $(ARGS)

gpu: ## check and measure on one GPU, in eight minutes: with PYTHON=, a Python that has JAX for CUDA, flax and pytest
	@PYTHONPATH="$(CARRIED):$$PYTHONPATH" $(or $(PYTHON),python3) tools/gpu/run.py --out $(or $(OUT),.cache/gpu) $(ARGS)

gpu-carry: ## put into .cache what `make gpu` needs on a machine without a network, for Python 3.12 on Linux
	@python3 -m pip install -qq --target $(CARRIED) --python-version 3.12 --platform manylinux2014_x86_64 \
	  --only-binary=:all: --no-deps pydantic pydantic_core annotated_types typing_inspection typing_extensions optax absl-py

check: ## format, lint, types, import order, the site of the documentation
	@$(ready) $(VENV) dev
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/python -m mypy
	$(bin)/python -m pytest -q -m "not product" tests/test_house.py
	$(bin)/zensical build --strict --clean

bench: ## print the numbers of docs/development/speed.md
	@$(ready) $(VENV) demo
	@$(bin)/python -m benchmarks $(ARGS)

bench-peers: ## the same next to flax, eformer and haliax, in an environment of their own
	@$(ready) $(VENV_PEERS) demo,peers
	@$(VENV_PEERS)/bin/python -m benchmarks --peers $(ARGS)

docs: ## run every snippet of the documentation, then build it into site/; a broken link or any warning fails
	@$(ready) $(VENV) test,docs
	@$(bin)/python -m pytest -q -m "not product" tests/docs $(ARGS)
	@$(bin)/zensical build --strict --clean
	@$(bin)/python -m tools.plans site/plans
	@echo "look at it: $(bin)/python -m http.server -d site, then open http://localhost:8000"

clean: ## remove caches, build outputs and the default environments
	rm -rf .venv .venv-latest .venv-tpu .venv-gpu .venv-peers .cache build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
