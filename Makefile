# make demo     a federation on this machine, about half a minute after the installation
# make quick    the tests of what is pure and runs in one process (tests/unit): under a minute
# make test     these and the ones that start processes: minutes (ARGS=--long: chaos, floods, whole pages of the
#               documentation too, as before each change lands; ARGS=--slow: soak and the paper as well, hours)
# make lint     formatting, types, imports, generated files
# make proto    write the protobuf modules again after a change of proto/
# make docs     write the generated parts of docs and deploy again, and build the documentation as a site in site/
# make policy   checkov over deploy/, from an environment of its own (.venv-policy): it pins much of what we use
# make pins     write what the images install, with hashes, again after a change of constraints.txt
# make helm     Helm into the environment, for the tests of the chart, where it is not on the PATH (Linux on x86-64)
# make bench    what a round costs, beside gRPC's own floor
# make clean    remove what was made here, the environments too
#
# Each installs what it needs into .venv first, once. It takes Python 3.11 or newer and make.
# PYTHON=python3.12 names another interpreter; VENV=DIR another environment; TORCH=cuda or TORCH=cpu PyTorch's build
# (default: cpu where there is no NVIDIA driver). JOBS=4 runs four test files at a time, JOBS=0 one after the other in
# pytest's own process. For two cores it is 2, and 3 where tests also wait.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia/version ] || [ -e /dev/dxg ] && \
	echo cuda || echo cpu)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
BIN := $(VENV)/bin
COMMA := ,
# Whole files, in pytest's order: what takes longest comes first, and tests/unit fills up at the end.
SIDE_BY_SIDE = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo quick test lint proto docs policy pins helm bench clean venv
.DELETE_ON_ERROR:

demo: $(VENV)/.tasks
	$(BIN)/afl demo $(ARGS)

# What is compiled is kept, whatever a shell says: each process of pytest would take 4 s for the assertions alone.
quick test: export PYTHONDONTWRITEBYTECODE =

quick: JOBS ?= 2
quick: $(VENV)/.dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/unit $(ARGS)

test: JOBS ?= 3
test: $(VENV)/.dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m afl_tools.docs --check
	$(BIN)/python -m afl_tools.protobuf --check

proto: $(VENV)/.dev
	PYTHON=$(abspath $(BIN))/python sh proto/generate.sh

docs: $(VENV)/.dev
	$(BIN)/python -m afl_tools.docs --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

policy: $(VENV)/.dev .venv-policy/bin/checkov
	AFL_CHECKOV=$(abspath .venv-policy/bin/checkov) $(BIN)/python -m pytest tests/deployment/test_pod_security.py $(ARGS)

.venv-policy/bin/checkov:
	$(PYTHON) -m venv .venv-policy
	.venv-policy/bin/python -m pip install --quiet checkov==3.3.30

# As on a system that PyTorch has no CUDA for: PyTorch and what its CUDA builds need come from its own index.
PIN = MACOSX_DEPLOYMENT_TARGET=14.0 .venv-pins/bin/uv pip compile --quiet --python-version 3.11 \
	--python-platform aarch64-apple-darwin --constraint constraints.txt --generate-hashes --no-annotate \
	--custom-compile-command "make pins" --no-emit-package torch --no-emit-package torchvision pyproject.toml

pins: .venv-pins/bin/uv
	$(PIN) --output-file deploy/containers/requirements-server.txt
	$(PIN) --output-file deploy/containers/requirements-worker.txt --extra tasks

.venv-pins/bin/uv:
	$(PYTHON) -m venv .venv-pins
	.venv-pins/bin/python -m pip install --quiet uv==0.13.9

helm: $(BIN)/helm

$(BIN)/helm: | $(VENV)/.dev
	command -v helm || $(BIN)/python -m afl_tools.helm $@

bench: $(VENV)/.dev
	$(BIN)/python -m afl_benchmarks.rounds $(ARGS)

clean:
	rm -rf .venv .venv-* build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find common cli server worker lab benchmarks reproduction tools tests -type d -name __pycache__ -prune -exec rm -rf {} +

venv: $(VENV)/.dev

# The stamps say what is installed; pip runs again only when one of these two files changes. It shows what it does:
# the first time it takes minutes.
# The versions' suffix makes sure that both come from PyTorch's own index, whatever other indexes pip knows.

define install
	@echo "Installing afl, PyTorch and what they need into $(VENV): a few minutes, once."
	@if [ "$(TORCH)" = cpu ]; then \
		echo "PyTorch is the build for CPUs, for a machine without an NVIDIA driver: make TORCH=cuda takes the other (5 GB)."; \
		$(BIN)/python -m pip install --retries 1 --no-deps --index-url $(CPU_INDEX) \
			$$(sed -n 's/^torch.*==.*/&+cpu/p' constraints.txt) || \
		echo "pip could not take that from $(CPU_INDEX): PyTorch is the usual index's build, on most machines 5 GB."; \
	fi
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(1)]'
endef

$(VENV)/.tasks: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,tasks)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,tasks$(COMMA)dev)
	@touch $(VENV)/.tasks $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
