"""What a run reports about itself, over all processes: losses, throughput, samples fed and updates skipped.

Figures are collected where they arise (tensors on the device, counts on the host) and read once per logging step, so
that no step waits for the host.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from shared.checkpoints import resuming
from shared.errors import UserError, complain, listed
from shared.monitoring.hooks import Hook
from shared.plan.batches import MicroBatch
from shared.plan.draws import MASK64, hash64

MAX_SKIPPED_IN_A_ROW = 10
SAME_NORM = 1e-3  # relative, of the same gradients on machines of different kinds
BESIDE = ("evaluation", "checkpoint", "profile")  # outside the steps


class Monitor:
    """Collects a step's figures and reads them at logging steps.

    Args:
        accelerator: reduces over its processes.
        lengths: int64 [N] or [N, k], or None: see `TrainingRun.start`.
        state: the monitor's state in the checkpoint from which the run resumes; empty in a new run.
        hooks: add figures of their own.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        lengths: NDArray[np.integer] | None,
        state: Mapping[str, Any],
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.accelerator, self.lengths, self.hooks = accelerator, lengths, hooks
        self.digest = 0  # of the sample ids fed to the model by this process
        self.fed: list[MicroBatch] = []  # not yet counted
        self.samples = self.tokens = 0  # fed by this process since the last reading
        self.total_samples = self.total_tokens = 0  # fed by all processes up to the last reading, since the run began
        self.steps = self.steps_before = 0  # since the last reading; those of them taken before this start
        self.resumed = bool(state)  # and there was no reading yet
        # The loss and its parts, by the name of the figure: those of the micro-batches since the last reading, on the
        # device, and the sum over steps whose losses are no longer there.
        self.losses: dict[str, list[Tensor]] = {}
        self.skips: list[Tensor] = []  # of the steps since then, 1.0 where the update was left out
        self.sums = {"loss": np.float32(0)}
        self.skipped = self.in_a_row = self.most_in_a_row = 0  # updates since the run began, on any process
        self.window_started = self.read_at = time.perf_counter()
        self.beside = dict.fromkeys(BESIDE, 0.0)  # seconds since the last reading
        if state:
            self._restore(state)

    def add(self, micro_batch: MicroBatch, loss: Tensor, parts: Mapping[str, Tensor] | None = None) -> None:
        """Count a micro-batch that went through the model; its arguments are those of `TrainingRun.count`.

        Raises:
            UserError: an earlier micro-batch had other parts.
        """
        self._passed("last_micro_batch" if micro_batch.last else "micro_batch")
        figures = {"loss": loss, **{f"loss_{name}": part for name, part in (parts or {}).items()}}
        if self.losses and self.losses.keys() != figures.keys():  # the processes could not add them up
            raise UserError(
                f"run.count: a micro-batch has {', '.join(figures)}, an earlier one {', '.join(self.losses)}: give "
                "each micro-batch the same parts, 0 for one that it lacks"
            )
        for name, value in figures.items():
            self.losses.setdefault(name, []).append(value.detach())
        if micro_batch.counted:
            self.fed.append(micro_batch)

    def end_step(self, skipped: Tensor) -> None:
        """Count a step; `skipped` is 1.0 where its update was left out, on the device."""
        self.steps += 1
        self.skips.append(skipped)
        self._passed("optimizer")

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time what happens inside as one of BESIDE, apart from the steps."""
        self._passed("rest")
        begun = time.perf_counter()
        yield
        self.beside[part] += time.perf_counter() - begun
        self._passed(part)

    def read(self, grad_norm: float = 0.0) -> dict[str, float | str]:
        """The figures since the last call, over all processes; call it on all of them, with the last `grad_norm`.

        Returns `loss` and its parts (means over steps), `samples` (running digest of the ids fed, hexadecimal),
        `samples_per_second`, `tokens_per_second` (real tokens, for sequences), `step_seconds`, `skipped_updates` (since
        the run began), `processes`, `grad_norm`, and the figures of the hooks.

        The time of evaluation and checkpoints is only in `evaluation_seconds` and `checkpoint_seconds`. Times cover
        only the steps since this start; the first reading of a resumed run has their number, `timed_steps`.

        Raises:
            UserError: the processes have different gradients.
        """
        rows = self._gather(grad_norm)
        norms = rows["grad_norm"]
        if len(norms) > 1 and not np.allclose(norms, norms[0], rtol=SAME_NORM, equal_nan=True):
            raise UserError(
                f"the processes have different gradients, of norms {listed([f'{norm:.4g}' for norm in norms])}: each "
                "would train a model of its own; compute_loss must call the model that run.prepare returned, and only "
                "the backward passes before the last one are in no_sync (docs/your_own_recipe.md)"
            )
        totals, seconds = self._totals(rows), float(rows["seconds"].mean())
        figures: dict[str, float | str] = {
            **{name: totals[name] / max(self.steps, 1) for name in self.sums},
            "samples": totals["digest"],
            "samples_per_second": totals["samples"] / seconds,
            "skipped_updates": self.skipped,
            "processes": self.accelerator.num_processes,
            "step_seconds": seconds / max(self.steps - self.steps_before, 1),
            "grad_norm": grad_norm,
            "evaluation_seconds": float(rows["evaluation"].mean()),
            "checkpoint_seconds": float(rows["checkpoint"].mean()),
        }
        if self.lengths is not None:
            figures["tokens_per_second"] = totals["tokens"] / seconds
        for hook in self.hooks:
            figures |= {name: float(value) for name, value in hook.figures(rows).items()}
        if self.resumed:
            figures["timed_steps"] = self.steps - self.steps_before
            self.resumed, self.steps_before = False, 0
        self.total_samples += totals["samples"]
        self.total_tokens += totals["tokens"]
        self.steps = self.samples = self.tokens = 0
        self.sums = dict.fromkeys(["loss", *self.losses], np.float32(0))
        self.window_started, self.beside = self.read_at, dict.fromkeys(BESIDE, 0.0)
        return figures

    def refuse_skipped_updates(self, output_dir: str, last_step: int | None = None) -> None:
        """End the run if ten updates in a row were skipped before the last reading.

        At the end of the run, given as `last_step`, updates after that reading count as well. A run of fewer than ten
        steps ends if all its updates were skipped.

        Raises:
            UserError: gives the number, and names the last checkpoint from which the run can go on.
        """
        if last_step is not None:
            self._sum_up()
        in_a_row = self.most_in_a_row
        if in_a_row >= MAX_SKIPPED_IN_A_ROW or 0 < in_a_row == last_step:
            good = filter(is_good, resuming.checkpoints_of(output_dir).values())
            raise UserError(
                f"the gradients of {in_a_row} steps in a row were not finite, and their updates were "
                "skipped: lower --learning_rate, or use --mixed_precision bf16 or no; last good checkpoint: "
                f"{max(good, default='none')}"
            )
        if last_step is not None and self.in_a_row and self.accelerator.is_main_process:
            complain(
                f"warning: the updates of the last {self.in_a_row} of {last_step} steps were skipped, because their "
                f"gradients were not finite: the last model is that of step {last_step - self.in_a_row}"
            )

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, the same on every process; call this on all processes."""
        totals = self._totals(self._gather())
        return totals | {
            **{name: getattr(self, name) for name in ("steps", "skipped", "in_a_row", "most_in_a_row")},
            "total_samples": self.total_samples + totals["samples"],
            "total_tokens": self.total_tokens + totals["tokens"],
        }

    def summary(self, seconds: float) -> dict[str, float]:
        """The figures of a run that took `seconds`, for the last line of metrics.jsonl; call this on all processes.

        The seconds of evaluation and checkpoints after the last reading are included, since no other line has them.
        Where updates were skipped, there are `skipped_updates` and under fp16 `loss_scale`.
        """
        rows = self._gather()
        totals = self._totals(rows)
        rates = {
            "train_runtime": seconds,
            "train_samples_per_second": (self.total_samples + totals["samples"]) / seconds,
        }
        if self.lengths is not None:
            rates["train_tokens_per_second"] = (self.total_tokens + totals["tokens"]) / seconds
        for part in ("evaluation", "checkpoint"):
            if late := float(rows[part].mean()):
                rates[f"{part}_seconds"] = late
        if self.skipped:
            rates["skipped_updates"] = self.skipped
            if self.accelerator.scaler is not None:
                rates["loss_scale"] = self.accelerator.scaler.get_scale()
        return rates

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's figures, so that the digest and the next mean are those of one run."""
        self.steps = self.steps_before = state["steps"]
        self.total_samples, self.total_tokens = state["total_samples"], state["total_tokens"]
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        self.most_in_a_row = state["most_in_a_row"]
        self.sums = {name: np.float32(0) for name in state if name == "loss" or name.startswith("loss_")}
        if self.accelerator.is_main_process:  # these are summed over processes, so one process takes the whole
            self.digest = int(state["digest"], 16)
            self.sums = {name: np.float32(state[name]) for name in self.sums}

    def _gather(self, grad_norm: float = 0.0) -> dict[str, NDArray[np.float64]]:
        """The figures of all processes since the last reading, each [processes]; one host wait, one collective call."""
        self._count_fed()
        self._sum_up()  # waits for the device
        self._passed("rest")
        self.read_at = time.perf_counter()
        mine = {
            **self.sums,
            "digest_high": self.digest >> 32,  # two halves, so that sums in float64 are exact
            "digest_low": self.digest & 0xFFFFFFFF,
            "samples": self.samples,
            "tokens": self.tokens,
            **self.beside,
            "grad_norm": grad_norm,
            "seconds": self.read_at - self.window_started - sum(self.beside.values()),
            **{name: value for hook in self.hooks for name, value in hook.measured().items()},
        }
        rows = np.array([[*mine.values()]], np.float64)
        if self.accelerator.num_processes > 1:
            rows = self.accelerator.gather(torch.from_numpy(rows).to(self.accelerator.device)).cpu().numpy()
        return dict(zip(mine, rows.T, strict=True))

    def _passed(self, part: str) -> None:
        for hook in self.hooks:
            hook.passed(part)

    def _totals(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
        """Sums over the processes."""
        digest = (int(rows["digest_high"].sum()) << 32) + int(rows["digest_low"].sum())
        return {
            **{name: float(rows[name].sum()) for name in self.sums},
            "digest": f"{digest & MASK64:016x}",
            **{name: int(rows[name].sum()) for name in ("samples", "tokens")},
        }

    def _sum_up(self) -> None:
        """Add up the losses and skips since the last reading: one after the other in float32, in their order."""
        if not self.skips and not any(self.losses.values()):
            return
        kinds = [*self.losses.values(), self.skips]
        figures = torch.stack([figure.float() for kind in kinds for figure in kind]).cpu().numpy()
        *losses, skips = np.split(figures, np.cumsum([len(kind) for kind in kinds])[:-1])
        for name, values in zip(self.losses, losses, strict=True):
            before = self.sums.get(name, np.float32(0))
            self.sums[name] = np.cumsum(np.append(before, values), dtype=np.float32)[-1]  # it does not sum pairwise
        for skipped in skips.astype(bool).tolist():
            self.skipped += skipped
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
        self.losses, self.skips = {name: [] for name in self.losses}, []

    def _count_fed(self) -> None:
        """Count the samples fed and add their ids to the digest: once per reading, not in every step."""
        if not self.fed:
            return
        samples = np.concatenate([m.samples for m in self.fed])
        epochs = np.concatenate([m.epochs for m in self.fed])
        steps = np.repeat([m.step for m in self.fed], [len(m.samples) for m in self.fed])
        ids = hash64(steps.astype(np.uint64), epochs.astype(np.uint64), samples.astype(np.uint64))
        self.digest = (self.digest + int(ids.sum())) & MASK64  # a sum: neither order nor process matters
        self.samples += len(samples)
        if self.lengths is not None:
            self.tokens += int(self.lengths[samples].astype(np.int64).sum())
        self.fed = []


def is_good(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved after a finite update, and a run that resumes from it does not end at once.

    False if it cannot be read, or has just been removed.
    """
    with suppress(OSError, ValueError):
        state = resuming.read_state(checkpoint)["monitor"]
        return not state["in_a_row"] and state["most_in_a_row"] < MAX_SKIPPED_IN_A_ROW
    return False
