"""Check on a tiny random batch that a faster replacement in a model leaves outputs and gradients unchanged.

The replacements rely on how the modules of transformers work today. The check at each start ensures that a new version
of transformers cannot cause wrong numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from shared.errors import say
from shared.monitoring.evaluation import evaluating
from shared.speed.layers import in_float32

TOLERANCE = 1e-4  # in float32, relative to the largest logit; rounding causes a tenth of it
GRADIENT_TOLERANCE = 1e-2  # rounding adds up through the layers; a missing part of a gradient is far larger
LENGTH, PADDED, PATCHES = 8, 3, 2  # tokens of the longest row, padding of the shortest, patches along a side
WIDEST_WINDOW = 128  # tokens; a row longer than a wider window would cost too much


def keep_if_equal(
    model: Any,
    name: str,
    replace: Callable[[], object],
    undo: Callable[[], object],
    make_batch: Callable[[Any], dict[str, Any]],
) -> bool:
    """Replace a part of a model; undo the replacement if outputs or gradients change by more than rounding.

    The model runs in eval mode on the device of its weights. Call this before `prepare`, when the model is not yet
    sharded by FSDP. Gradients are compared only for small parameters: biases, norms and adapters. Every trained layer
    has some of them, and they cost little. `grad`, buffers, modes and random states do not change.

    Args:
        name: name of the replacement, for the warning that is printed if it is undone.
        undo: restores the model; does nothing if `replace` was not called.
        make_batch: returns a batch for a model with this config, on the CPU.

    Returns:
        Whether the replacement stays. It is also undone if the model cannot compute the batch.
    """
    try:
        expected, expected_gradient = outputs_and_gradient(model, make_batch)
        replace()
        found, gradient = outputs_and_gradient(model, make_batch)
        if same(found, expected) and same(gradient, expected_gradient, GRADIENT_TOLERANCE):
            return True
        problem = "it changes the outputs or gradients by more than rounding"
    except Exception as error:  # any model, any version of transformers
        problem = f"it cannot be checked ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    undo()
    say(
        f"warning: a {type(model).__name__} is trained with the code of transformers {version('transformers')}, "
        f"without {name}: {problem}"
    )
    return False


def text_batch(config: Any) -> dict[str, Tensor]:
    """Random input_ids and attention_mask [3, length]: rows of different lengths, each with its end-of-sequence token.

    If a model has local attention, the longest row is longer than its window. The second row has a mask token if the
    config names one: an ESM scales the embeddings of a row by its share of them.
    """
    window = getattr(config, "sliding_window", None) or 0
    length = LENGTH + (window if window <= WIDEST_WINDOW else 0)
    length = min(length, (getattr(config, "max_position_embeddings", None) or length + 2) - 2)
    pad, end = config.pad_token_id or 0, getattr(config, "eos_token_id", None)
    words = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token not in (pad, end)])
    drawn = torch.randint(len(words), (3, length), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[length], [length - 1], [length - PADDED]])
    place = torch.arange(length)
    ids = words[drawn].masked_fill(place >= lengths, pad)
    if isinstance(end, int) and end < config.vocab_size:
        ids = ids.masked_fill(place == lengths - 1, end)
    if (mask := getattr(config, "mask_token_id", None)) is not None and mask < config.vocab_size:
        ids[1, 1] = mask
    return {"input_ids": ids, "attention_mask": (place < lengths).long()}


def image_batch(config: Any) -> dict[str, Any]:
    """Two random images of a few patches, pixel_values [2, channels, height, width]; ViT interpolates positions."""
    size = (PATCHES * config.patch_size,) * 2
    pixels = torch.randn(2, config.num_channels, *size, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "interpolate_pos_encoding": True}


def outputs_and_gradient(model: Any, make_batch: Callable[[Any], dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the gradient of their sum of squares for biases, norms and adapters, both flattened."""
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and (p.ndim == 1 or ".lora_" in name)]
    with torch.enable_grad(), in_eval_mode(model):
        batch = send_to_device(make_batch(model.config), next(model.parameters()).device)
        outputs = torch.cat([output.flatten() for output in compared(model(**batch))])
        if not parameters:
            return outputs.detach(), outputs.new_zeros(1)
        parts = torch.autograd.grad(outputs.square().sum(), parameters, allow_unused=True, materialize_grads=True)
    return outputs.detach(), torch.cat([part.flatten() for part in parts])


def outputs_of(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs for a batch that are `compared`, without dropout and uncompiled; the model keeps its mode."""
    with torch.no_grad(), in_eval_mode(model):
        return compared(model(**batch))


def compared(output: Any) -> list[Tensor]:
    """The outputs of a model that checks compare: its logits, or all floating point tensors if it names no logits.

    A question-answering head has two, start_logits and end_logits. `output` is a tensor, or a mapping, a named tuple or
    a dataclass of tensors and other values.
    """
    if isinstance(output, Tensor):
        return [output]
    named = output if isinstance(output, Mapping) else getattr(output, "_asdict", lambda: vars(output))()
    found = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return [value for name, value in found.items() if name.endswith("logits")] or [*found.values()]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run `model` in eval mode, in float32 and uncompiled in this context; then restore modes and random state."""
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices=[]), eager, in_float32(model), evaluating(model):
        yield


def same(given: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether all values agree to `tolerance` times the largest; for dtypes below float32, at least eight epsilons."""
    tolerance = max(tolerance, 8 * torch.finfo(expected.dtype).eps)
    return bool((given - expected).abs().max() <= tolerance * expected.abs().max())
