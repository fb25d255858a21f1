"""Count how often the host waits for the device in each step of a recipe's loop.

A step begins when the loop sets the learning rate and ends when it asks whether to log. On a GPU CUDA reports each wait
(`torch.cuda.set_sync_debug_mode`). On a CPU nothing waits; there the operations are counted that would make the host
wait for a GPU. Their result is a Python number, or a tensor whose size depends on values. Compiling takes time of the
host as well; the compiled graphs are counted per process.
"""

import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2", "new_tensor"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
HEARD = "synchronizing CUDA operation"


def compiled_graphs() -> int:
    """The number of graphs compiled in this process, from `torch._dynamo.utils.counters`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class Operations(TorchDispatchMode):
    """Calls `found` with the name of each operation that would make the host wait for a GPU."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function.__name__.split(".")[0]
        by_mask = name in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITS or by_mask:
            self.found(name)
        return function(*args, **(kwargs or {}))


class HostWaits:
    """A context that counts the waits in the steps of `recipe`, a module with a recipe's loop.

    Args:
        recipe: a call of its `set_learning_rate` begins a step, a call of its Plan's `due` ends it.
        mode: on a GPU, "warn" counts the waits, "error" raises at the first one.

    Attributes:
        steps: number of waits in each step, in order.
        where: number of waits by line of Python; on a CPU by operation and line.
    """

    def __init__(self, recipe: ModuleType, mode: str = "warn") -> None:
        self.recipe, self.mode = recipe, mode
        self.on_gpu = torch.cuda.is_available()
        self.steps: list[int] = []
        self.where: Counter[str] = Counter()
        self.inside: ExitStack | None = None

    def __enter__(self) -> "HostWaits":
        from shared.optimization import gradients
        from shared.plan.batches import Plan

        begin, due, new_tensor = self.recipe.set_learning_rate, Plan.due, torch.Tensor.new_tensor

        def set_learning_rate(*args: Any) -> None:
            self._begin()
            begin(*args)

        def due_after_the_step(*args: Any) -> bool:
            self._end()
            return due(*args)

        def counted_new_tensor(*args: Any, **kwargs: Any) -> Any:
            self._found("new_tensor")
            return new_tensor(*args, **kwargs)

        self.stack = ExitStack()
        enter = self.stack.enter_context
        enter(mock.patch.object(self.recipe, "set_learning_rate", set_learning_rate))
        enter(mock.patch.object(Plan, "due", due_after_the_step))
        if self.on_gpu:
            enter(warnings.catch_warnings())
            warnings.filterwarnings("always", message=f".*{HEARD}.*")
            show = warnings.showwarning
            warnings.showwarning = lambda message, *at, **kwargs: (
                self._found(f"{at[1]}:{at[2]}") if HEARD in str(message) else show(message, *at, **kwargs)
            )
        else:
            enter(mock.patch.object(torch.Tensor, "new_tensor", counted_new_tensor))
            enter(
                mock.patch.object(gradients, "HOST", "nowhere")
            )  # takes the code path of a GPU, where the host must not read
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        self.stack.close()

    def _begin(self) -> None:
        self._end()
        self.steps.append(0)
        self.inside = ExitStack()
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode(self.mode)
            self.inside.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            self.inside.enter_context(Operations(self._found))

    def _end(self) -> None:
        if self.inside:
            self.inside.close()
        self.inside = None

    def _found(self, what: str) -> None:
        if self.inside is None:
            return
        self.steps[-1] += 1
        self.where[what if self.on_gpu else f"{what} at {caller()}"] += 1


def caller() -> str:
    """The innermost line of the call stack outside of torch, as FILE:LINE."""
    frame = sys._getframe(1)
    here = (str(Path(torch.__file__).parent), __file__)
    while frame.f_back and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
