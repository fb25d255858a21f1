"""FSDP2, step by step: a recipe's loop with a sharded model on two processes over gloo, with an overflow in one step.

Each forward and backward pass communicates, so both processes need the same number of micro-batches. Whole runs of the
recipes are in test_fsdp_recipes.py; `make gpu` runs accelerate_configs/fsdp.yaml on GPUs.
"""

import os

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from shared.compat import of_accelerate
from shared.config.options import Options
from shared.fsdp.strategy import shard
from shared.monitoring.monitor import Monitor
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, make_schedule, set_learning_rate, step_if_finite
from shared.plan.batches import Plan
from shared.plan.loading import Loader

CONFIG = Options(learning_rate=0.01, weight_decay=0.1, global_batch_size=8, max_grad_norm=0.2)
SAMPLES, OVERFLOW_AT = 41, 2  # five steps of 8 samples and one of a single sample
LENGTHS = np.random.default_rng(0).integers(1, 30, SAMPLES)
LENGTHS[:3] = 30  # long rows, so that some micro-batches have few rows and others many


class Classifier(nn.Module):
    """Mean of embeddings, then two layers. No layer is repeated, so the model is sharded as a whole."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 3))  # 33 rows: uneven shards

    def forward(self, ids):
        return self.body(self.embedding(ids).sum(1) / (ids > 0).sum(1, keepdim=True))


class Sequences(torch.utils.data.Dataset):
    draws_random = False

    def __len__(self):
        return SAMPLES

    def __getitem__(self, row):
        return torch.arange(row, row + LENGTHS[row]) * 7 % 49 + 1, row % 3


def collate(rows):
    ids, targets = zip(*rows, strict=True)
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor(targets)


def train_steps(accelerator, model, sync, equal_counts):
    """The loop of a recipe, one epoch; `sync(last)` tells the model whether this backward pass communicates."""
    plan = Plan(
        lengths=LENGTHS,
        seed=0,
        global_batch_size=CONFIG.global_batch_size,
        num_epochs=1,
        max_tokens=60,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        equal_counts=equal_counts,
    )
    parameters, optimizer = list(model.parameters()), make_optimizer(model, CONFIG)
    loader = Loader(Sequences(), plan, collate, accelerator.device)
    monitor = Monitor(accelerator, LENGTHS, {})
    schedule = make_schedule(CONFIG, plan.total_steps)
    steps = []
    for step in range(plan.total_steps):
        set_learning_rate(optimizer, schedule(step))
        for micro_batch, (ids, targets) in loader.micro_batches(step):
            loss = F.cross_entropy(model(ids), targets, reduction="sum") * micro_batch.counted / micro_batch.step_size
            monitor.add(micro_batch, loss)
            if step == OVERFLOW_AT and micro_batch.index == 1:
                loss = loss * torch.inf  # on one process only
            sync(micro_batch.last)
            (loss * accelerator.num_processes).backward()
        grad_norm = gradients.clip(accelerator, parameters, CONFIG.max_grad_norm)
        monitor.end_step(step_if_finite(accelerator, optimizer, grad_norm))
        optimizer.zero_grad()
        figures = monitor.read()
        steps.append({"loss": figures["loss"], "samples": figures["samples"], "grad_norm": str(float(grad_norm))})
    return {"steps": steps, "skipped": figures["skipped_updates"]}


def train_sharded(accelerator, folder):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    from torch.distributed.tensor import DTensor

    os.environ["FSDP_VERSION"] = "2"
    of_accelerate.use_fsdp_on_cpu(accelerator)

    def train(policy):
        of_accelerate.fsdp_settings(accelerator).cpu_offload = policy
        torch.manual_seed(0)
        model = Classifier()
        shard(accelerator, model)
        is_sharded = all(isinstance(p, DTensor) for p in model.parameters())
        result = train_steps(accelerator, model, model.set_requires_gradient_sync, equal_counts=True)
        return model, result | {"sharded": is_sharded}

    _, offloaded = train(CPUOffloadPolicy(pin_memory=False))  # memory cannot be pinned without a GPU
    model, result = train(OffloadPolicy())
    result["offloaded"] = offloaded
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        save_file(weights, folder / "model.safetensors")
    return result


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """(the results of two processes, the weights they saved)."""
    folder = tmp_path_factory.mktemp("fsdp")
    return runs.in_group(train_sharded, 2, folder), load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone():
    """(the result of one process, its weights)."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = Classifier()
    return train_steps(Accelerator(cpu=True), model, lambda last: None, equal_counts=False), model.state_dict()


def test_steps_equal_those_of_one_process_and_the_update_that_is_not_finite_is_skipped(sharded, alone):
    (main, second), weights = sharded
    assert main["sharded"]
    assert second["sharded"]
    assert main["steps"] == second["steps"]
    assert [step["samples"] for step in main["steps"]] == [step["samples"] for step in alone[0]["steps"]]
    for key in ("loss", "grad_norm"):
        ours, expected = ([float(step[key]) for step in result["steps"]] for result in (main, alone[0]))
        assert ours == pytest.approx(expected, rel=1e-5, nan_ok=True), key
    assert main["skipped"] == second["skipped"] == alone[0]["skipped"] == 1
    finite = [np.isfinite(float(step["grad_norm"])) for step in main["steps"]]
    assert finite == [step != OVERFLOW_AT for step in range(len(finite))]
    assert weights.keys() == alone[1].keys()
    vectors = [torch.cat([w[name].flatten().double() for name in sorted(w)]) for w in (weights, alone[1])]
    assert runs.distance(*vectors) < 1e-6


def test_parameters_on_the_host_give_the_same_steps(sharded):
    """fsdp_offload_params, as far as a CPU can show: the same policy, with host and device in one memory."""
    for result in sharded[0]:
        for key in ("steps", "skipped"):
            assert result["offloaded"][key] == result[key]
