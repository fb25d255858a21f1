# make setup · demo · test · lint: see README.md. Everything happens in .venv, which the first target to need it makes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-docs test-clusters lint campaign gpu clean
help:
	@echo "make setup     make .venv with the pinned requirements"
	@echo "make demo      train recipes/nlp.py on the embedded data, into a fresh folder (CONFIG=accelerate_configs/... overrides)"
	@echo "make test      install what the tests need and run them"
	@echo "make test-docs  run the commands of README.md and docs/"
	@echo "make test-clusters  the tests with two machines, as network namespaces of this one"
	@echo "make lint      ruff, ruff format, mypy"
	@echo "make campaign  the long tests"
	@echo "make gpu       the tests that need a GPU"

setup: .venv/installed
.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11, 3.12 or 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	touch $@

# The config that fits this machine: the number of GPUs decides.
demo: setup
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	case "$$gpus" in 0) fitting=cpu;; 1) fitting=single_gpu;; *) fitting="multi_gpu";; esac; \
	config="$(CONFIG)"; [ -n "$$config" ] || config=accelerate_configs/$$fitting.yaml; \
	processes=""; [ "$$fitting" = multi_gpu ] && [ -z "$(CONFIG)" ] && processes="--num_processes $$gpus"; \
	out=out/demo-$$(date +%Y%m%d-%H%M%S); set -x; \
	$(BIN)/accelerate launch --config_file $$config $$processes recipes/nlp.py --output_dir $$out

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not campaign and not clusters and not docs"

test-docs: .venv/installed-dev
	$(BIN)/python -m pytest -m docs

# Two machines, as network namespaces of this one: needs root and iproute2, and says so where it cannot run.
test-clusters: .venv/installed-dev
	$(BIN)/python -m pytest -s -m clusters

campaign: .venv/installed-dev
	$(BIN)/python -m pytest -m campaign

gpu: .venv/installed-dev
	$(BIN)/python -m pytest -m gpu

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
