"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382): training leaves out residual branches at random."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.augmentation.augmentation import uniform
from shared.augmentation.operations import to
from shared.errors import UserError
from shared.images.image_models import residual_blocks
from shared.plan.batches import MicroBatch

STREAM = 4  # separates these draws from those of data sets (1), dropout (2) and augmentation (3)


class Branch(nn.Module):
    """The end of a residual branch: multiplies each sample by its factor. It has no weights."""

    factors: Tensor  # [rows, 1, 1, 1]: 0 for a sample that leaves the branch out

    def forward(self, outputs: Tensor) -> Tensor:
        """[rows, channels, height, width], scaled in training and unchanged in evaluation."""
        return outputs * self.factors.to(outputs.dtype) if self.training else outputs


class StochasticDepth:
    """The branches of a model, and which of them each sample of a micro-batch takes.

    Block i of n is left out with the probability `rate` * i / n, and its output is divided by the probability that
    it is not. Each draw is a function of seed, epoch, sample and block, so it depends on no micro-batch or process.

    Args:
        model: a ResNet of transformers. Call this before the model is compiled.
        rate: probability of the last block; 0 changes nothing.
        seed: of the run.

    Raises:
        UserError: the model has no such blocks, or they are frozen.
    """

    def __init__(self, model: nn.Module, rate: float, seed: int) -> None:
        self.seed, self.branches = seed, []
        blocks: list[Any] = residual_blocks(model) if rate else []
        if rate and not (blocks and all(p.requires_grad for block in blocks for p in block.parameters())):
            raise UserError(
                f"--stochastic_depth {rate} needs a ResNet whose blocks are trained: leave out this flag or "
                "--freeze_backbone; a model such as ConvNeXt has drop_path_rate in its config.json instead"
            )
        self.kept = 1 - rate * np.arange(1, len(blocks) + 1)[:, None] / max(1, len(blocks))
        for block in blocks:
            self.branches.append(Branch())
            block.layer.append(self.branches[-1])

    def draw(self, micro_batch: MicroBatch, device: torch.device) -> None:
        """Decide which branches the samples of the next forward pass take."""
        if self.branches:
            draws = uniform(len(self.branches), self.seed, micro_batch, STREAM)
            factors = to(device, (draws < self.kept) / self.kept)
            for branch, rows in zip(self.branches, factors[..., None, None, None], strict=True):
                branch.factors = rows
