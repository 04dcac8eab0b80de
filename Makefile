# One environment in $(VENV), made from an interpreter found by running candidates; see `make help`.
# A target that installs leaves a stamp, so that the next call installs nothing.

VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=
# test processes: one per core, four at most (each compiles its own programs)
JOBS ?= auto

# cpu, cuda12 or cuda13; found from the NVIDIA driver unless given
ifeq ($(origin ACCELERATOR),undefined)
ACCELERATOR := $(or $(shell sh scripts/accelerator.sh),cpu)
endif
ifeq ($(filter cpu cuda12 cuda13,$(ACCELERATOR)),)
$(error ACCELERATOR must be cpu, cuda12 or cuda13, found "$(ACCELERATOR)")
endif

comma := ,
GPU_EXTRA := $(filter-out cpu,$(ACCELERATOR))
DEMO_EXTRAS := $(GPU_EXTRA)
TEST_EXTRAS := test,train$(addprefix $(comma),$(GPU_EXTRA))

INSTALLED := $(VENV)/.installed-$(ACCELERATOR)
INSTALLED_TEST := $(VENV)/.installed-test-$(ACCELERATOR)
# The compiler wheels live beside the environment's own packages, not among them: JAX would try to start a GPU plugin
# that it finds there, on every run of a machine that has no GPU.
DEVICELESS := $(abspath $(VENV))/deviceless
# Changing a .proto installs again, and installing is what generates the stubs.
INSTALL_INPUTS := pyproject.toml constraints.txt scripts/build_hook.py rlt_jax/__init__.py \
	$(shell find protos -name '*.proto' 2>/dev/null)

# The build tools come from constraints.txt too, so that next year's build makes the same stubs.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
BUILD_TOOLS = $(shell $(PY) scripts/requirements.py build-system)

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo install test lint types format test-gpu deviceless constraints clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  variables: PYTHON (interpreter), VENV (=$(VENV)), ACCELERATOR (=$(ACCELERATOR)), PYTEST_ARGS, JOBS (=$(JOBS))"

demo: $(INSTALLED) ## serve the bundled model and stream three completions from it
	$(PY) -m rlt_jax.demo

install: $(INSTALLED) ## make the environment, nothing else

test: $(INSTALLED_TEST) lint types ## lint, type check and the whole test suite on the CPU
	JAX_PLATFORMS=cpu $(PY) -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED_TEST) ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED_TEST) ## mypy on rlt_jax and server
	$(PY) -m mypy

format: $(INSTALLED_TEST) ## rewrite the sources as ruff wants them
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

test-gpu: $(INSTALLED_TEST) ## the tests that need an NVIDIA GPU
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest tests/gpu $(PYTEST_ARGS)

deviceless: $(INSTALLED_TEST) $(DEVICELESS)/.installed ## compile for the H200 without one, and check what XLA made
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHONPATH=$(DEVICELESS) $(PY) -m pytest tests/deviceless $(PYTEST_ARGS)

constraints: $(INSTALLED_TEST) ## resolve all dependencies anew and rewrite constraints.txt
	$(PY) scripts/lock.py

clean: ## remove the environment, the generated stubs and all caches
	rm -rf rlt build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi

$(PY):
	@python=$$(sh scripts/find_python.sh) && echo "environment $(VENV) from $$python" && "$$python" -m venv --clear "$(VENV)"

$(INSTALLED): $(INSTALL_INPUTS) | $(PY)
	@echo "installing rlt_jax$(addprefix [,$(addsuffix ],$(DEMO_EXTRAS))) into $(VENV) (minutes the first time)"
	@$(PIP) $(BUILD_TOOLS)
	@$(PIP) --no-build-isolation -e '.$(addprefix [,$(addsuffix ],$(DEMO_EXTRAS)))'
	@touch $@

$(INSTALLED_TEST): $(INSTALL_INPUTS) | $(PY)
	@echo "installing rlt_jax[$(TEST_EXTRAS)] into $(VENV) (minutes the first time)"
	@$(PIP) $(BUILD_TOOLS)
	@$(PIP) --no-build-isolation -e '.[$(TEST_EXTRAS)]'
	@touch $(INSTALLED) $@

$(DEVICELESS)/.installed: pyproject.toml constraints.txt | $(INSTALLED_TEST)
	@echo "installing the GPU compiler wheels into $(DEVICELESS) (0.7 GB on disk)"
	@rm -rf $(DEVICELESS)
	@$(PIP) --no-deps --target $(DEVICELESS) $(shell $(PY) scripts/requirements.py deviceless)
	@touch $@
