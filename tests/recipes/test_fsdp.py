"""Updates under FSDP2 on two processes over gloo, with an overflow in one step, as in the loop of a recipe.

Whole runs of the recipes are in test_fsdp_recipes.py; `make gpu` runs accelerate_configs/fsdp.yaml on GPUs.
"""

import os

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared.compat import of_accelerate_fsdp
from shared.config.options import Options
from shared.fsdp.strategy import shard
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, step_if_finite

CONFIG = Options(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.2)
STEPS, OVERFLOW_AT = 6, 2


def build():
    """No layer is repeated, so the model is sharded as a whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 3))  # 33 rows: uneven shards


def train(accelerator, model, sync=lambda last: None):
    """Steps of two micro-batches, of which each process has its rows; the norm of each step and whether it was skipped.

    `sync(last)` tells the model whether this backward pass communicates.
    """
    parameters, optimizer, found = list(model.parameters()), make_optimizer(model, CONFIG), []
    for step in range(STEPS):
        batches = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
        for number, rows in enumerate(batches.unbind()):
            loss = model(rows[accelerator.process_index :: accelerator.num_processes]).square().sum() / 16
            if step == OVERFLOW_AT and number == 1 and accelerator.is_main_process:
                loss = loss * torch.inf  # on one process only
            sync(number == 1)
            (loss * accelerator.num_processes).backward()
        grad_norm = gradients.clip(accelerator, parameters, CONFIG.max_grad_norm)
        skipped = step_if_finite(accelerator, optimizer, grad_norm)
        optimizer.zero_grad()
        found.append([str(float(grad_norm)), bool(skipped)])
    return found


def train_sharded(accelerator, folder):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    from torch.distributed.tensor import DTensor

    os.environ["FSDP_VERSION"] = "2"
    of_accelerate_fsdp.use_fsdp_on_cpu(accelerator)
    found = {}
    # Memory cannot be pinned without a GPU.
    for name, policy in (("offloaded", CPUOffloadPolicy(pin_memory=False)), ("steps", OffloadPolicy())):
        accelerator.state.fsdp_plugin.cpu_offload = policy
        model = build()
        shard(accelerator, model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        found[name] = train(accelerator, model, model.set_requires_gradient_sync)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        save_file(weights, folder / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """(the results of two processes, the weights they saved)."""
    folder = tmp_path_factory.mktemp("fsdp")
    return runs.in_group(train_sharded, 2, folder), load_file(folder / "model.safetensors")


def test_steps_equal_those_of_one_process_and_the_update_that_is_not_finite_is_skipped(sharded, accelerator):
    (main, second), weights = sharded
    model = build()
    expected = train(accelerator, model)
    assert main["steps"] == second["steps"]
    assert [skipped for _, skipped in main["steps"]] == [step == OVERFLOW_AT for step in range(STEPS)]
    norms, wanted = ([float(norm) for norm, _ in steps] for steps in (main["steps"], expected))
    assert norms == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert [bool(np.isfinite(norm)) for norm in norms] == [not skipped for _, skipped in main["steps"]]
    vectors = [torch.cat([w[name].flatten().double() for name in sorted(w)]) for w in (weights, model.state_dict())]
    assert runs.distance(*vectors) < 1e-6


def test_parameters_on_the_host_give_the_same_steps(sharded):
    """fsdp_offload_params, as far as a CPU can show: the same policy, with host and device in one memory."""
    for result in sharded[0]:
        assert result["offloaded"] == result["steps"]
