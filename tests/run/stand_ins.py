"""Objects that stand in for an Accelerator, for tests."""

from types import SimpleNamespace

import torch


def accelerator(processes=1, precision="no", device="cpu"):
    """The attributes of an Accelerator that the tested functions use."""
    return SimpleNamespace(
        num_processes=processes,
        is_main_process=True,
        is_local_main_process=True,
        device=torch.device(device),
        mixed_precision=precision,
        print=print,
        get_state_dict=lambda model: model.state_dict(),
        unwrap_model=lambda model: model,
    )
