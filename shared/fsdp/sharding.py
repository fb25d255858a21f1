"""FSDP2: which parts of a model are gathered together, decided here and carried out by torch's `fully_shard`.

Accelerate decides by the modules that transformers declares indivisible. For most encoders these include the
embeddings, and Accelerate then fails on parameters that two of its parts share (tied weights, the decoder's bias).
"""

from collections import Counter
from typing import Any

from torch import nn

from shared.compat import of_fsdp
from shared.models.layers import repeated_layers
from shared.processes import barrier


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

    barrier.wait_for_all(accelerator)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    settings = of_fsdp.fsdp_settings(accelerator)
    for layer in units(model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, offload_policy=settings.cpu_offload
        )
    fully_shard(model, mesh=mesh, offload_policy=settings.cpu_offload)


def units(model: nn.Module) -> list[nn.Module]:
    """The repeated layers whose parameters nothing outside of them uses."""
    uses = parameter_uses(model)
    return [layer for layer in repeated_layers(model) if can_be_unit(layer, uses)]


def can_be_unit(layer: nn.Module, uses: Counter[int]) -> bool:
    """Whether `fully_shard` can gather a layer by itself: it has parameters of its own only, and a forward pass.

    `uses` is `parameter_uses` of the model.
    """
    inside = parameter_uses(layer)
    has_forward = not isinstance(layer, nn.ModuleList | nn.ModuleDict)
    return has_forward and bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())


def parameter_uses(module: nn.Module) -> Counter[int]:
    """Under how many names each parameter, by its id, occurs in a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
