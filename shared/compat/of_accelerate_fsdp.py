"""Private and undocumented attributes of Accelerate that belong to FSDP."""

from typing import Any


def fsdp_settings(accelerator: Any) -> Any:
    """`AcceleratorState.fsdp_plugin`, undocumented: what the launcher's `fsdp_config` asks for."""
    return accelerator.state.fsdp_plugin


def use_fsdp_on_cpu(accelerator: Any) -> None:
    """`distributed_type` and `fsdp_plugin` of Accelerate's states: what it sets for FSDP itself, but only on GPUs.

    On a CPU it drops FSDP without a word and would wrap the model by DDP.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # reads the launcher's environment variables
    for state in (PartialState(), accelerator.state):  # each new AcceleratorState copies the former
        state.distributed_type = DistributedType.FSDP
