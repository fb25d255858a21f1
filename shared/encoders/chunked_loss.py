"""`--chunked_loss`: the cross entropy of a masked language model without all of its logits in memory at once.

With a large vocabulary the logits are the largest tensors of a step, and a forward and backward pass holds them several
times. Here they exist for one chunk of tokens at a time. The forward pass also computes the gradients of the last
layer, so that no product is computed twice (Hsu et al., "Liger Kernel", arXiv:2410.10989).

`F.linear_cross_entropy` of torch 2.13 works in the same way. It is not used, because under bf16 it rounds the loss and
the factor of all gradients to bf16, and because older versions of torch lack it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shared.compat import of_torch
from shared.config.options import Rule
from shared.errors import UserError
from shared.models.linear_layers import linear
from shared.speed.self_check import difference, text_batch

LOGITS_OF_CHUNK = {"cpu": 1 << 23, "gpu": 1 << 26}  # 32 and 256 MiB in float32; a GPU needs large products

NOT_UNDER_FP16 = Rule(
    lambda it: it.precision == "fp16" and it.config.chunked_loss,
    "--chunked_loss does not work with mixed_precision fp16, whose loss is scaled too late for it: use "
    "--mixed_precision bf16 or no",
)


class Losses(NamedTuple):
    """The losses of n masked tokens."""

    total: Tensor
    """Their sum, float32, a scalar. Only this has a gradient."""
    each: Tensor
    """[n], float32."""
    hits: Tensor | None
    """[n], bool: whether the most likely token is the right one. None while gradients are computed."""


def use_chunked_loss(model: Any) -> None:
    """Make `model`, adapted by `predict_only_masked`, return `Losses` when it is called with `labels` [n].

    `labels` are the ids of the masked tokens. A call without `labels` is unchanged.

    Raises:
        UserError: the logits are not the output of one linear layer, or the losses or gradients differ by more than
            rounding from those of the whole logits.
    """
    kind = type(model).__name__
    decoder = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(decoder, nn.Linear):
        raise UserError(f"--chunked_loss: a {kind} has no linear layer that makes its logits: leave it out")
    chunked = ChunkedLoss(model.forward)
    of_torch.replace_forward(decoder, chunked.decode)
    of_torch.replace_forward(model, chunked)
    device = decoder.weight.device
    batch = send_to_device(text_batch(model.config) | {"masked": torch.tensor([1, 2, 4])}, device)  # in the first row
    labels = batch["input_ids"].flatten()[batch["masked"]]
    if problem := difference(
        model,
        lambda: F.cross_entropy(model(**batch).logits, labels, reduction="sum"),
        lambda: model(**batch, labels=labels).total,
    ):
        raise UserError(f"--chunked_loss does not work with a {kind} ({problem}): leave it out")


class ChunkedLoss:
    """The forward pass of a model for the `Losses` of `labels`, and that of its last layer.

    Args:
        forward: the forward pass of the model for logits.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.labels: Tensor | None = None  # of the current call
        self.losses: Losses | None = None

    def __call__(self, _: nn.Module, *args: Any, labels: Tensor | None = None, **arguments: Any) -> Any:
        self.labels, self.losses = labels, None
        try:
            output = self.forward(*args, **arguments)
            return output if labels is None else self.losses
        finally:
            self.labels = self.losses = None

    def decode(self, layer: Any, hidden: Tensor) -> Tensor:
        """The forward pass of the last layer: [n, width] -> [n, classes]."""
        if self.labels is None:
            return type(layer).forward(layer, hidden)
        self.losses = cross_entropy(hidden, layer.weight, layer.bias, self.labels)
        # Not read. It has the shape of the logits, from which operations are counted, and takes no memory.
        return self.losses.each.detach()[:, None].expand(-1, len(layer.weight))


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Losses:
    """The losses of the logits `hidden @ weight.T + bias` for `targets`.

    Products are computed in the dtype of autocast or, without it, of `hidden`; everything else in float32.

    Args:
        hidden: [n, width].
        weight: [classes, width].
        bias: [classes].
        targets: int64 [n], without ignored ones.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if torch.is_grad_enabled():
        total, each = SumOfCrossEntropies.apply(hidden, weight, bias, targets, dtype)
        return Losses(total, each, None)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    losses, hits = [], []
    for part in chunks(len(targets), len(weight), kind):
        logits = linear(hidden[part], weight, bias)
        losses.append(F.cross_entropy(logits.float(), targets[part], reduction="none"))
        hits.append(logits.argmax(1) == targets[part])
    each = torch.cat(losses)
    return Losses(each.sum(), each, torch.cat(hits))


class SumOfCrossEntropies(torch.autograd.Function):
    """The sum and each of the losses of `cross_entropy`. The sum has a gradient, which the forward pass computes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        of_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        inputs, matrix = hidden.to(dtype), weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        each = hidden.new_empty(len(targets), dtype=torch.float32)
        for part in chunks(len(targets), len(weight), hidden.device.type):
            logits = linear(inputs[part], matrix, offset)
            logs = F.log_softmax(logits, 1, dtype=torch.float32)
            del logits
            right = targets[part, None]
            each[part] = -logs.gather(1, right)[:, 0]
            gradient = logs.exp_().scatter_add_(1, right, logs.new_full(right.shape, -1.0))  # of the logits
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(dtype)
            if of_hidden is not None:
                of_hidden[part] = linear(gradient, matrix.T, None)
            if of_weight is not None:
                of_weight += linear(gradient.T, inputs[part].T, None)
            del logs, gradient  # before the next chunk needs the memory
        ctx.gradients, ctx.dtype = (of_hidden, of_weight, of_bias), hidden.dtype
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "a second backward pass would need the gradients again"
        scaled = [None if each is None else each.mul_(factor) for each in gradients]
        return scaled[0] if scaled[0] is None else scaled[0].to(ctx.dtype), scaled[1], scaled[2], None, None


def chunks(tokens: int, classes: int, device_type: str) -> list[slice]:
    """Slices of `tokens` rows of logits, each of about LOGITS_OF_CHUNK numbers."""
    size = max(1, LOGITS_OF_CHUNK["cpu" if device_type == "cpu" else "gpu"] // classes)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]
