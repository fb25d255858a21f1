"""How many micro-batches of a step can keep their activations: measured at the start, since it depends on the machine.

The number does not affect the result, so it may differ from start to start.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.checkpoints.staging import available_memory
from shared.processes.collectives import gather
from shared.processes.ending import local_processes

STATES = 6  # bytes per byte of the weights: gradients, two moments of an optimizer, and a checkpoint of all three
USED = 0.5  # of the other free memory; micro-batches differ, and backward passes and evaluations need memory as well


def measured(device: torch.device, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `forward`, and the bytes that its graph keeps until the backward pass.

    On a CPU weights that the backward pass reads are counted too, which is on the safe side.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        found = forward()
        return found, torch.cuda.memory_allocated(device) - before
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        found = forward()
    return found, sum(sizes.values())


def number_that_fits(accelerator: Any, model: nn.Module, bytes_of_one: int) -> int:
    """The number of micro-batches whose activations fit into the memory of every process, at least 1.

    Every process calls this, and gets the same number: under FSDP a forward pass communicates.
    """
    states = STATES * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    left = free_memory(accelerator.device) - states
    return min(gather(accelerator, max(1, int(USED * left / max(1, bytes_of_one)))))


def free_memory(device: torch.device) -> int:
    """The bytes that this process can still use on its device; 0 on a device that does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory() // local_processes() if device.type == "cpu" else 0
