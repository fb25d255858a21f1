"""Models of one's own, any `nn.Module`: what a recipe asks of them, checked before it trains; how they are saved."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError


@contextmanager
def checked(model: nn.Module) -> Iterator[None]:
    """Calls of `model` inside fit the recipe: `forward` takes the batch, and its output has the `logits` that are read.

    Raises:
        UserError: names the model and what is missing.
    """
    name = f"build_model: {type(model).__name__}"

    def takes(_: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        try:
            inspect.signature(model.forward).bind(*args, **batch)
        except TypeError as error:
            raise UserError(
                f"{name}.forward does not take what it is called with, {', '.join(batch)} ({error}): add the argument, "
                "or **kwargs"
            ) from None

    def gives(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not isinstance(getattr(output, "logits", torch.empty(0)), Tensor):
            raise without_logits(output)

    def without_logits(output: Any) -> UserError:
        return UserError(
            f"{name}.forward returns a {type(output).__name__} without logits: return a NamedTuple that has them, or "
            "one of transformers.modeling_outputs"
        )

    hooks = [model.register_forward_pre_hook(takes, with_kwargs=True), model.register_forward_hook(gives)]
    try:
        yield
    except AttributeError as error:
        if error.name != "logits":
            raise
        raise without_logits(error.obj) from None
    finally:
        for hook in hooks:
            hook.remove()
