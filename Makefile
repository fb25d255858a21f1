# make setup · demo · test · lint · bench: see README.md. All targets use .venv and create it if necessary.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo demo-images demo-mlm demo-tags demo-embeddings test test-docs test-clusters lint bench \
	bench-network results campaign gpu clean
help:
	@echo "make setup     create .venv with the pinned requirements"
	@echo "make demo      train recipes/nlp.py on the embedded data, into a new folder (CONFIG=accelerate_configs/... selects a config)"
	@echo "make demo-images  as make demo, with recipes/image_classification.py"
	@echo "make demo-mlm  as make demo, with recipes/mlm.py, for 500 steps"
	@echo "make demo-tags  as make demo, with recipes/token_classification.py"
	@echo "make demo-embeddings  as make demo, with recipes/embeddings.py and MiniLM, which is downloaded (83 MB)"
	@echo "make test      install the requirements of the tests and run the tests"
	@echo "make test-docs  run the commands of README.md and docs/"
	@echo "make test-clusters  run the tests of clusters: two machines, simulated by network namespaces (root), restarts, FSDP"
	@echo "make lint      run ruff, ruff format, mypy and import-linter"
	@echo "make bench     repeat the benchmarks of docs/performance.md; the machine must be idle (hours)"
	@echo "make bench-network  repeat the benchmarks of links between processes; the machine must be idle (1 hour, root)"
	@echo "make results TASK=reviews  repeat rows of docs/results.md, with all seeds, and rewrite the page"
	@echo "make campaign  run the long tests: hundreds of runs killed, damaged, signalled, resized (hours)"
	@echo "make gpu       run the tests and benchmarks that need a GPU: gpu-distributed, gpu-tests, gpu-text, gpu-images,"
	@echo "               gpu-variants, gpu-image-variants and gpu-peers, each in under nine minutes"
	@echo "make clean     remove .venv and the caches of the tools"

setup: .venv/installed
.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11, 3.12 or 3.13 is required, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt requirements-export.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	touch $@

# The number of GPUs determines the config.
demo: RECIPE := recipes/nlp.py
demo-images: RECIPE := recipes/image_classification.py
demo-mlm: RECIPE := recipes/mlm.py --optim muon --learning_rate 8e-3 --global_batch_size 16 --max_train_steps 500
demo-tags: RECIPE := recipes/token_classification.py
demo-embeddings: RECIPE := recipes/embeddings.py
demo-embeddings: PREPARE := $(BIN)/python benchmarks/demo_embeddings.py
demo demo-images demo-mlm demo-tags demo-embeddings: setup
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	case "$$gpus" in 0) fitting=cpu;; 1) fitting=single_gpu;; *) fitting="multi_gpu";; esac; \
	config="$(CONFIG)"; [ -n "$$config" ] || config=accelerate_configs/$$fitting.yaml; \
	processes="" expect=""; [ "$$fitting" = multi_gpu ] && [ -z "$(CONFIG)" ] && processes="--num_processes $$gpus" expect="--expect_processes $$gpus"; \
	out=out/$@-$$(date +%Y%m%d-%H%M%S); prepared=$$($(or $(PREPARE),true) $$out-untrained) || exit 1; set -x; \
	$(BIN)/accelerate launch --config_file $$config $$processes $(RECIPE) $$prepared $$expect --output_dir $$out

# An environment with PYTHONDONTWRITEBYTECODE would compile all tests in each worker and `shared` in each process.
test: .venv/installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu and not campaign and not clusters and not docs"

test-docs: .venv/installed-dev
	$(BIN)/python -m pytest -m docs

# Needs root and iproute2; the tests are skipped with a message if they cannot run.
test-clusters: .venv/installed-dev
	$(BIN)/python -m pytest -s -m clusters

# Writes tables to out/campaigns/. The tables in docs/checkpoints.md are copied from there by hand.
campaign: .venv/installed-dev
	mkdir -p out/campaigns
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python tests/campaigns/worlds.py > out/campaigns/worlds.md
	$(BIN)/python tests/campaigns/damage.py > out/campaigns/damage.md
	$(BIN)/python tests/campaigns/signals.py > out/campaigns/signals.md
	$(BIN)/python tests/campaigns/kills.py --kills 200 --processes 2 > out/campaigns/kills_2.md
	$(BIN)/python tests/campaigns/kills.py --kills 200 --processes 3 > out/campaigns/kills_3.md
	for recipe in token_classification embeddings; do \
		$(BIN)/python tests/campaigns/worlds.py --recipe $$recipe > out/campaigns/worlds_$$recipe.md && \
		$(BIN)/python tests/campaigns/kills.py --kills 60 --recipe $$recipe > out/campaigns/kills_$$recipe.md || exit 1; done
	cat out/campaigns/*.md

# Each part takes less than nine minutes, can be repeated alone, and adds an entry to the GPU's file in
# benchmarks/results/gpu. A part uses the Python of .venv. On a machine without .venv and without a network, choose the
# Python: make gpu PYTHON=python3. PYTHONPATH is kept.
GPU_PARTS := gpu-distributed gpu-tests gpu-text gpu-images gpu-variants gpu-image-variants gpu-peers
.PHONY: $(GPU_PARTS)
gpu:
	@failed=""; for part in $(GPU_PARTS); do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }
$(GPU_PARTS): gpu-%:
	@[ ! -x $(BIN)/python ] || $(MAKE) --no-print-directory .venv/installed-dev
	@python=$(BIN)/python; [ -x $$python ] || python="$(PYTHON)"; set -x; $$python benchmarks/gpu.py $* $(GPU_FLAGS)

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.venv/installed-bench: .venv/installed requirements-bench.txt requirements-export.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-bench.txt
	touch $@

# Both targets take hours and need an idle machine. `make bench` runs the benchmarks of docs/performance.md and writes
# its tables. `make bench-network` runs the benchmarks that depend on links between processes. The new results replace
# the files in benchmarks/results. Update the figures in other tables and in sentences by hand.
# A benchmark with results in out/bench does not run again, so that an interrupted `make bench` resumes. After a change
# of the code, run rm -r out/bench.
# ROUNDS: repetitions of each contestant. `make bench ROUNDS=1` only checks that everything runs.
ROUNDS ?= 5
PEERS := python benchmarks/peers.py --real --rounds $(ROUNDS)
SCALING := python benchmarks/scaling.py --repeats $(ROUNDS)
BENCHMARKS := real_classification real_regression real_mlm real_tagging real_embeddings utilisation loop_cost \
	bare_loop_same_batches preparing predictions checkpoints_cpu scale scale_processes
NETWORK := strong weak links variants

measure_real_classification := $(PEERS) --work classification \
	--contestants recipe "recipe --no_packing" "recipe --mixed_precision bf16" trainer_grouped trainer accelerate
measure_real_regression := $(PEERS) --work regression \
	--contestants recipe "recipe --no_packing" "recipe --mixed_precision bf16" trainer_grouped trainer accelerate
measure_real_mlm := $(PEERS) --work mlm
measure_real_tagging := $(PEERS) --work tagging
measure_real_embeddings := $(PEERS) --work embeddings
measure_utilisation := python benchmarks/utilisation.py --rounds $(ROUNDS)
measure_loop_cost := python benchmarks/loop_cost.py --rounds $(ROUNDS)
measure_bare_loop_same_batches := python benchmarks/bare_loop_same_batches.py --rounds $(ROUNDS)
measure_predictions := python benchmarks/predictions.py --rounds $(ROUNDS)
measure_preparing := python benchmarks/preparing.py --rounds 3
measure_scale := python benchmarks/scale.py --rounds $(ROUNDS)
measure_scale_processes := python benchmarks/scale.py --samples 10000000 --rounds 1 --steps 10 \
	--processes 8 64 512 4096 --samples_per_process 64 256 --images_per_process 384
measure_checkpoints_cpu := python benchmarks/checkpoints.py --rounds 31

measure_strong := $(SCALING) --processes 1 2
measure_weak := $(SCALING) --processes 1 2 --weak
measure_links := $(SCALING) --processes 2 --links 0 1000 300 100
measure_variants := $(SCALING) --processes 2 --links 1000 100 \
	--variants plain accumulate4 accumulate16 bf16 bf16_gradients fp16_gradients

.NOTPARALLEL:
out/bench/%/measured: | .venv/installed-bench
	rm -rf $(@D)
	$(BIN)/$(measure_$*) --output_dir $(@D)
	touch $@

define commit_results
for folder in $(1); do \
	for file in out/bench/$$folder/*.json out/bench/$$folder/*.md; do \
		[ ! -f $$file ] || cp $$file benchmarks/results/$$folder.$${file##*.}; \
	done; \
done
endef
# Root is needed to limit the bandwidth of links.
bench-network: $(NETWORK:%=out/bench/%/measured)
	$(call commit_results,$(NETWORK))

bench: $(BENCHMARKS:%=out/bench/%/measured)
	$(call commit_results,$(BENCHMARKS))
	$(BIN)/python benchmarks/results_table.py

# Rows of docs/results.md: TASK is a task of benchmarks/results/rows.yaml. ROWS: some of its rows only.
results: .venv/installed-bench
	$(BIN)/python benchmarks/quality.py $(if $(TASK),--task $(TASK)) $(if $(ROWS),--rows $(ROWS))

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
