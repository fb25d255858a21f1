# make setup · demo · test · lint · bench: see README.md. Everything happens in .venv, which the first target to need it
# makes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo demo-images demo-mlm test test-docs test-clusters lint bench campaign gpu clean
help:
	@echo "make setup     make .venv with the pinned requirements"
	@echo "make demo      train recipes/nlp.py on the embedded data, into a fresh folder (CONFIG=accelerate_configs/... overrides)"
	@echo "make demo-images  the same with recipes/image_classification.py"
	@echo "make demo-mlm  the same with recipes/mlm.py, for 300 steps"
	@echo "make test      install what the tests need and run them"
	@echo "make test-docs  run the commands of README.md and docs/"
	@echo "make test-clusters  the tests with two machines, as network namespaces of this one"
	@echo "make lint      ruff, ruff format, mypy"
	@echo "make bench     measure everything in docs/performance.md again, on a machine that does nothing else"
	@echo "make campaign  the long tests: hundreds of runs killed, damaged, signalled, resized (hours)"
	@echo "make gpu       the tests that need a GPU, and what is measured on one"

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
demo: RECIPE := recipes/nlp.py
demo-images: RECIPE := recipes/image_classification.py
demo-mlm: RECIPE := recipes/mlm.py --max_train_steps 300
demo demo-images demo-mlm: setup
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	case "$$gpus" in 0) fitting=cpu;; 1) fitting=single_gpu;; *) fitting="multi_gpu";; esac; \
	config="$(CONFIG)"; [ -n "$$config" ] || config=accelerate_configs/$$fitting.yaml; \
	processes="" expect=""; [ "$$fitting" = multi_gpu ] && [ -z "$(CONFIG)" ] && processes="--num_processes $$gpus" expect="--expect_processes $$gpus"; \
	out=out/$@-$$(date +%Y%m%d-%H%M%S); set -x; \
	$(BIN)/accelerate launch --config_file $$config $$processes $(RECIPE) $$expect --output_dir $$out

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not campaign and not clusters and not docs"

test-docs: .venv/installed-dev
	$(BIN)/python -m pytest -m docs

# Two machines, as network namespaces of this one: needs root and iproute2, and says so where it cannot run.
test-clusters: .venv/installed-dev
	$(BIN)/python -m pytest -s -m clusters

# Tables into out/campaigns/; what docs/checkpoints.md shows of them is copied by hand.
campaign: .venv/installed-dev
	mkdir -p out/campaigns
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python tests/campaigns/worlds.py > out/campaigns/worlds.md
	$(BIN)/python tests/campaigns/damage.py > out/campaigns/damage.md
	$(BIN)/python tests/campaigns/signals.py > out/campaigns/signals.md
	$(BIN)/python tests/campaigns/kills.py --kills 200 --processes 2 > out/campaigns/kills_2.md
	$(BIN)/python tests/campaigns/kills.py --kills 200 --processes 3 > out/campaigns/kills_3.md
	cat out/campaigns/*.md

# Under nine minutes: what must be right, then what is measured, each cut off when its time is over. With .venv's
# Python; a machine without a .venv, which may be able to fetch nothing, takes its own: make gpu PYTHON=python3.
gpu:
	@python=$(BIN)/python; [ -x $$python ] || python="$(PYTHON)"; export PYTHONPATH=.; set -x; \
	timeout 220 $$python -m pytest -q -m gpu tests/test_gpu.py; tests=$$?; \
	timeout 300 $$python benchmarks/gpu.py --seconds 280 && exit $$tests

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/installed-bench: .venv/installed requirements-bench.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-bench.txt
	touch $@

# What docs/performance.md has from results/. Limited links take root. What is measured replaces what is committed, and
# the table of lanes is written anew; figures in other tables and in sentences, and those that the prediction on paper
# starts from, are changed by hand. Experiments on accuracy take hours and are not in it: large_batches.py and
# pretraining.py, whose commands stand in their pages.
# How often each contestant has its turn; make bench ROUNDS=1 is a trial of everything, and no measurement.
ROUNDS ?= 5
LINKS := 1000 300 100
PEERS := benchmarks/peers.py --rounds $(ROUNDS) --global_batch_size 256 --max_tokens_per_micro_batch 1024
LANES := monitor_cost loop_cost same_batches images_cpu peers_fp32 peers_bf16 peers_eval mlm_cpu utilisation independent \
	startup start techniques mlm_head tokenizing checkpoints_cpu
bench: .venv/installed-bench
	rm -rf out/bench
	$(BIN)/torchrun --nproc-per-node 2 benchmarks/collectives.py --output_dir out/bench/collectives
	$(BIN)/python benchmarks/scaling.py --processes 1 2 --strong --repeats $(ROUNDS) --output_dir out/bench/strong
	$(BIN)/python benchmarks/scaling.py --processes 1 2 --weak --repeats $(ROUNDS) --output_dir out/bench/weak
	$(BIN)/python benchmarks/scaling.py --processes 2 --links 0 $(LINKS) --repeats $(ROUNDS) --output_dir out/bench/links
	$(BIN)/python benchmarks/scaling.py --processes 2 --links 1000 100 --repeats $(ROUNDS) --output_dir out/bench/variants \
		--variants plain accumulate4 accumulate16 bf16 bf16_gradients fp16_gradients power_sgd buckets1 buckets100
	$(BIN)/python benchmarks/predict.py --measured out/bench/links/scaling.json --gradient_bytes 5576212 \
		--late_bytes 4527636 --output_dir out/bench/predict_links
	$(BIN)/python benchmarks/predict.py --sleep 0.2 --processes 3 --links $(LINKS) --gradient_bytes 5576212 \
		--output_dir out/bench/predict_sleep
	$(BIN)/python benchmarks/predict.py --token_seconds 5.1e-5 --tokens 1301 --gradient_bytes 5576212 \
		--late_bytes 4527636 --latency 1e-4 --bandwidth 1.19e8 --output_dir out/bench/predict_paper
	$(BIN)/torchrun --nproc-per-node 2 benchmarks/exposed.py --output_dir out/bench/exposed
	$(BIN)/python benchmarks/loop_cost.py --rounds $(ROUNDS) --output_dir out/bench/loop_cost
	$(BIN)/python benchmarks/monitor_cost.py --output_dir out/bench/monitor_cost
	$(BIN)/python benchmarks/same_batches.py --rounds $(ROUNDS) --output_dir out/bench/same_batches
	$(BIN)/python benchmarks/image_peers.py --rounds $(ROUNDS) --output_dir out/bench/images_cpu
	$(BIN)/python $(PEERS) --lanes nlp --output_dir out/bench/peers_fp32
	$(BIN)/python $(PEERS) --lanes nlp --mixed_precision bf16 --rows 16 --output_dir out/bench/peers_bf16
	$(BIN)/python benchmarks/peers.py --rounds $(ROUNDS) --lanes eval --output_dir out/bench/peers_eval
	$(BIN)/python benchmarks/mlm_peers.py --rounds $(ROUNDS) --output_dir out/bench/mlm_cpu
	$(BIN)/python benchmarks/utilisation.py --rounds $(ROUNDS) --output_dir out/bench/utilisation
	$(BIN)/python benchmarks/independent.py --rounds $(ROUNDS) --output_dir out/bench/independent
	$(BIN)/python benchmarks/startup.py --rounds $(ROUNDS) --output_dir out/bench/startup
	$(BIN)/python benchmarks/start.py --rounds 3 --output_dir out/bench/start
	$(BIN)/torchrun --nproc-per-node 2 benchmarks/techniques.py --rounds $(ROUNDS) --output_dir out/bench/techniques
	$(BIN)/python benchmarks/mlm_head.py --output_dir out/bench/mlm_head
	$(BIN)/python benchmarks/tokenizing.py --output_dir out/bench/tokenizing
	$(BIN)/python benchmarks/checkpoints.py --rounds 15 --global_batch_size 32 --recoveries 3 --output_dir out/bench/checkpoints_cpu
	for folder in collectives strong weak links variants predict_links predict_sleep predict_paper exposed $(LANES); do \
		for file in out/bench/$$folder/*.json out/bench/$$folder/*.md out/bench/$$folder/*.png; do \
			[ ! -f $$file ] || cp $$file benchmarks/results/$$folder.$${file##*.}; \
		done; \
	done
	$(BIN)/python benchmarks/lanes.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
