"""A model and its optimizer whose state has a given size."""

from typing import Any

WIDTH = 2048  # of each linear layer of the model


def build(gigabytes: float) -> tuple[Any, Any, Any]:
    """An accelerator, and a model and its optimizer, whose state will have so many bytes, prepared."""
    import torch
    from accelerate import Accelerator

    from shared.config.options import Options
    from shared.optimization.optimizers import make_optimizer

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return accelerator, *accelerator.prepare(model, make_optimizer(model, Options()))
