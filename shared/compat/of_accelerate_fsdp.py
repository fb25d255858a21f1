"""Undocumented attributes of Accelerate that FSDP on a CPU needs."""

from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def use_fsdp_on_cpu(accelerator: Any) -> None:
    """`distributed_type` and `fsdp_plugin` of Accelerate's states: what it sets for FSDP itself, but only on GPUs.

    On a CPU it drops FSDP without a word and would wrap the model by DDP. `cpu_offload` is off: a CPU is the host.
    """
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(cpu_offload=False)  # reads the launcher's variables
    for state in (PartialState(), accelerator.state):  # each new AcceleratorState copies the former
        state.distributed_type = DistributedType.FSDP
