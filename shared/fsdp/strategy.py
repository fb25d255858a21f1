"""FSDP2 in a run: the rules of its launch, its hook, what it does in another way than DDP, and how it shards a model.

Which parts of a model are gathered together is decided here, and carried out by torch's `fully_shard`. Accelerate
decides by the modules that transformers declares indivisible. For most encoders these include the embeddings, and
Accelerate then fails on parameters that two of its parts share (tied weights, the decoder's bias).
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared.checkpoints.resuming import NEW_RUN
from shared.compat import of_accelerate_fsdp
from shared.config.options import Rule
from shared.errors import UserError
from shared.fsdp import checkpoints
from shared.models.trainable import SaverWithoutFrozen, load_without_frozen, repeated_layers
from shared.monitoring.hooks import Hook
from shared.processes import collectives, rules
from shared.processes.rules import uses_fsdp
from shared.run.training_run import Ddp

RULES = (
    Rule(
        lambda it: it.sharded and it.env.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() not in rules.FALSE,
        "fsdp_cpu_ram_efficient_loading is true, the default of Accelerate: only one process would load the weights, "
        "and none sends them to the others: set it to false",
    ),
    rules.one_of(("true", "false"), "FSDP_OFFLOAD_PARAMS"),  # with 1 Accelerate offloads, but without gloo for the host
    Rule(
        lambda it: it.sharded and it.on_cpu and not rules.is_true(it.env, rules.USE_CPU),
        "distributed_type FSDP needs a GPU, and there is none: use accelerate_configs/multi_cpu.yaml, or set "
        "ACCELERATE_USE_CPU=true in the environment to try FSDP out on a CPU",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and it.processes == 1,
        "distributed_type FSDP on a CPU with one process would shard nothing: start several processes, or use "
        "accelerate_configs/cpu.yaml",
    ),
    Rule(
        lambda it: it.sharded and it.precision == "fp16",
        "mixed_precision fp16 does not work under FSDP (its loss scaler fails with fused AdamW): use bf16",
    ),
    Rule(
        lambda it: it.sharded and it.config.optim != "adamw" and it.config.optim,
        "--optim {found} does not work under FSDP, which recipes support only with AdamW: use --optim adamw, or DDP",
    ),
    Rule(
        lambda it: it.sharded and it.env.get("FSDP_VERSION", "1") != "2",
        "fsdp_version 1 is not supported: set fsdp_version: 2, as accelerate_configs/fsdp.yaml does",
    ),
)


class Sharding(Hook):
    """Shards the model of a run that was launched with FSDP. Others can resume from the checkpoints of such a run."""

    def opened(self, run: Any) -> None:
        """Choose how the processes hold the model."""
        run.strategy = Fsdp() if uses_fsdp(os.environ) else Whole()
        if uses_fsdp(os.environ) and run.accelerator.device.type == "cpu":
            of_accelerate_fsdp.use_fsdp_on_cpu(run.accelerator)


class Whole(Ddp):
    """DDP, which also reads sharded checkpoints, and saves no frozen parameters of a pretrained model."""

    saver = SaverWithoutFrozen

    def load(self, path: Path, model: nn.Module, optimizer: Any, registered: list[Any]) -> None:
        """Load the tensors of a checkpoint of either kind."""
        if checkpoints.is_in(path):
            checkpoints.load(path, model, optimizer)
        else:
            load_without_frozen(path, model, optimizer, registered)


class Fsdp(Ddp):
    """Each process has a shard of each parameter, of its gradient and of its optimizer state."""

    name = "FSDP2"
    saver = checkpoints.ShardedSaver
    equal_counts = True

    def place(self, accelerator: Any, model: nn.Module) -> None:
        """Shard the model, which also moves it to the device."""
        shard(accelerator, model)

    def wrap(self, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """As in DDP; the model is sharded already, and Accelerate only adds autocast."""
        collectives.wait_for_all(accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)

    def load(self, path: Path, model: nn.Module, optimizer: Any, registered: list[Any]) -> None:
        """Load this process's part of a sharded checkpoint.

        Raises:
            UserError: the checkpoint is not sharded.
        """
        if not checkpoints.is_in(path):
            raise UserError(
                f"{path} was saved without FSDP and cannot be resumed with it: start without "
                f"accelerate_configs/fsdp.yaml, or {NEW_RUN}"
            )
        checkpoints.load(path, model, optimizer)

    def weights(self, accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
        """The gathered weights, with one tensor under all names of a tied parameter; FSDP gathers one for each name."""
        weights = super().weights(accelerator, model)
        first: dict[int, str] = {}
        names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in accelerator.unwrap_model(model).named_parameters(remove_duplicate=False)
        }
        return {name: weights[names.get(name, name)] for name in weights}


def shard(accelerator: Any, model: nn.Module) -> None:
    """Shard a model's parameters over all processes, in place; call it on every process, before the optimizer is made.

    Each repeated layer is gathered when it computes and freed again, as `fsdp_reshard_after_forward` says. All other
    parameters (embeddings, heads, what several layers share) are gathered with the model itself, once per forward
    pass, and freed after its backward pass. A model without repeated layers is gathered as a whole.

    Weights and gradients travel in float32, and autocast computes in the precision of --mixed_precision: this is the
    arithmetic of DDP. Buffers are not sharded. Every process must have the same weights, since none are broadcast.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    collectives.wait_for_all(accelerator)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    settings = of_accelerate_fsdp.fsdp_settings(accelerator)
    for each in model.parameters():  # FSDP2 refuses channels-last, and a convolution takes the format of its images
        each.data = each.data.contiguous()
    for layer in units(model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, offload_policy=settings.cpu_offload
        )
    fully_shard(model, mesh=mesh, offload_policy=settings.cpu_offload)


def units(model: nn.Module) -> list[nn.Module]:
    """The repeated layers that can be gathered alone: they have a forward pass, and parameters of their own only."""
    uses = parameter_uses(model)
    layers = [layer for layer in repeated_layers(model) if not isinstance(layer, nn.ModuleList | nn.ModuleDict)]
    return [layer for layer in layers if (inside := parameter_uses(layer)) and inside.items() <= uses.items()]


def parameter_uses(module: nn.Module) -> Counter[int]:
    """Under how many names each parameter, by its id, occurs in a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
