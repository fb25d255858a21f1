"""What a recipe requires of a model, checked before training."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError


@contextmanager
def checked(model: nn.Module) -> Iterator[None]:
    """Check calls of `model` in this context: `forward` must take the batch and return an output with `logits`.

    Raises:
        UserError: a requirement is not met; the message names the model and what is missing.
    """
    name = f"build_model: {type(model).__name__}"

    def check_arguments(_: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        try:
            inspect.signature(model.forward).bind(*args, **batch)
        except TypeError as error:
            raise UserError(
                f"{name}.forward does not accept its arguments, {', '.join(batch)} ({error}): add the argument, "
                "or **kwargs"
            ) from None

    def check_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not isinstance(getattr(output, "logits", torch.empty(0)), Tensor):
            raise without_logits(output)

    def without_logits(output: Any) -> UserError:
        return UserError(
            f"{name}.forward returns a {type(output).__name__} without logits: return a NamedTuple with logits, or "
            "an output of transformers.modeling_outputs"
        )

    hooks = [model.register_forward_pre_hook(check_arguments, with_kwargs=True)]
    hooks.append(model.register_forward_hook(check_output))
    try:
        yield
    except AttributeError as error:
        if error.name != "logits":
            raise
        raise without_logits(error.obj) from None
    finally:
        for hook in hooks:
            hook.remove()


def frozen_models(model: nn.Module) -> list[str]:
    """The names of whole models inside a model that are frozen, but in training mode, such as a teacher.

    Parts of a model with adapters are frozen as well, and are none.
    """
    if hasattr(model, "merge_adapters"):
        return []
    return [
        name
        for name, module in model.named_modules()
        if name and hasattr(module, "save_pretrained") and module.training and any(True for _ in module.parameters())
        if not any(parameter.requires_grad for parameter in module.parameters())
    ]


def check_names(model: torch.nn.Module) -> None:
    """Check that a transformers model has the weights of its class, so that `from_pretrained` can load its export.

    Raises:
        UserError: a weight was added or removed; the message names it.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return
    with torch.device("meta"):
        own: Any = type(model)
        expected = set(own(copy.deepcopy(model.config)).state_dict())
    found = set(model.state_dict())
    if changed := sorted(found ^ expected):
        what = "has" if changed[0] in found else "lacks"
        raise UserError(
            f"build_model: a {type(model).__name__} that {what} {changed[0]} ({len(changed)} weights differ) could be "
            "exported, but from_pretrained would not load it as trained: change the model's class, or return a "
            "torch.nn.Module of your own that contains the model"
        )
