"""What a recipe adds to its run, such as a tracker: the run calls each hook at certain moments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.plan.batches import MicroBatch

Value = float | int | str


class Hook:
    """The moments of a run, in their order. A hook overrides the methods that it needs.

    Every process calls every method, except `saved` and `ended`.

    `run` is the `TrainingRun`. A hook may read all that it has at that moment, and add rows to `run.card`. A hook that
    `prepare` gets misses the moments before. A finished run that is started again has only those up to
    `first_checkpoint`, `exported` and `ended`. A run that ends by an error, or a dry run, has no `closed`.
    """

    note: str = ""
    """A paragraph for the model card of the run."""

    def opened(self, run: Any) -> None:
        """The processes are connected. Refuse here what could only fail later."""

    def folder_locked(self) -> None:
        """The output folder is locked, and nothing in it has been read: a hook may add checkpoints."""

    def first_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """A checkpoint of another run from which a new run begins, and its state as if it were of this run; or None."""
        return None

    def given(self, run: Any, model: nn.Module) -> None:
        """The recipe has made its model, on any device, and nothing has been computed."""

    def averaged_buffers(self, model: nn.Module) -> Sequence[Tensor]:
        """The buffers that a forward pass may change, because the hook makes them the same on all processes."""
        return ()

    def placed(self, run: Any, model: nn.Module) -> None:
        """The model is on its device, and its optimizer comes next: parameters may still be frozen."""

    def prepared(self, run: Any) -> None:
        """The model and the optimizer are wrapped; passes before the first step are discarded."""

    def loaded(self, run: Any) -> None:
        """The checkpoint is loaded, if there is one. The launch card comes next."""

    def begun(self, run: Any) -> None:
        """The launch card is printed, and the first step comes next."""

    def measured(self) -> dict[str, float]:
        """Figures of this process since the last reading, which are gathered from all processes.

        A save asks for them, too. A reading ends with `figures`: begin anew there.
        """
        return {}

    def figures(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """Figures for metrics.jsonl, from what `measured` and the monitor gave, each [processes]."""
        return {}

    def passed(self, part: str) -> None:
        """The time since the last call belongs to `part`, which has just ended.

        `part` is "micro_batch", "last_micro_batch" (the backward pass summed gradients over processes), "optimizer",
        "evaluation", "checkpoint", "profile", or "rest".
        """

    def counted(self, micro_batch: MicroBatch) -> None:
        """A micro-batch went through the model."""

    def updated(self, grad_norm: Tensor) -> None:
        """The update of a step is made, or left out because `grad_norm` is not finite."""

    def step_ended(self) -> None:
        """The step is counted."""

    def weights_are_read(self) -> None:
        """The model is evaluated, saved or averaged next: it must have the weights and buffers that count."""

    def logged(self, step: int, values: Mapping[str, Value]) -> None:
        """A line of metrics.jsonl was written."""

    def before_export(self, model: nn.Module) -> None:
        """The model has the weights to export."""

    def saved(self, run: Any, model: nn.Module, folder: Path) -> None:
        """The model is saved in `folder`, which becomes model/: a hook may add files. Only the main process calls this.

        `model` is unwrapped.
        """

    def exported(self, folder: Path) -> None:
        """The model is in `folder`."""

    def ended(self, run: Any) -> None:
        """The run is complete, with the last line of metrics.jsonl; or was before. Only the main process calls this."""

    def closed(self) -> None:
        """The run has ended, or a signal ends it after its last checkpoint."""
