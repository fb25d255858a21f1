"""What a run reports about itself: losses, throughput, what was fed and what was skipped, over all processes.

Everything is collected where it arises (tensors on the device, counts on the host) and read once per logging step, so
that no step waits for the host.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from shared import checkpoints
from shared.batches import MicroBatch, hash64
from shared.errors import UserError
from shared.flops import peak_flops

MAX_SKIPPED_IN_A_ROW = 10
_MASK = 0xFFFFFFFFFFFFFFFF


class Monitor:
    """Collects a step's figures and reads them at logging steps.

    Args:
        accelerator: reduces over its processes.
        lengths: int64 [N], real tokens of each sample; None when samples are no sequences.
        seconds_waited: the loader's running total of seconds spent waiting for data.
        state: what a checkpoint kept of it, to go on from; empty at the start of a run.
        flops: float64 [N], operations that each sample asks for (`shared.flops`); None: not reported.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        lengths: NDArray[np.integer] | None,
        seconds_waited: Callable[[], float],
        state: Mapping[str, Any],
        flops: NDArray[np.float64] | None = None,
    ) -> None:
        self.accelerator, self.lengths, self.seconds_waited = accelerator, lengths, seconds_waited
        self.flops, self.operations = flops, 0.0  # asked for by what this process was fed since the last reading
        self.digest = 0  # of the sample ids fed to the model by this process
        self.fed: list[MicroBatch] = []  # not yet counted
        self.samples = self.tokens = 0  # fed by this process since the last reading
        self.total_samples = self.total_tokens = 0  # fed by all processes up to the last reading, since the run began
        self.steps = 0  # since the last reading
        self.most_skipped_in_a_row = 0  # at the last reading
        # Sum of losses since the last reading; updates skipped since the run began; skipped in a row, now and at most.
        self.sums = torch.zeros(4, device=accelerator.device)
        self.window_started, self.window_waited = time.perf_counter(), seconds_waited()
        if state:
            self._restore(state)

    def add(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Count a micro-batch that went through the model; `loss` is its share of the step's mean, on the device."""
        self.sums[0] += loss.detach()
        if micro_batch.counted:
            self.fed.append(micro_batch)

    def end_step(self, skipped: Tensor) -> None:
        """Count a step; `skipped` is 1.0 where its update was left out, on the device."""
        self.steps += 1
        self.sums[1] += skipped
        self.sums[2].add_(1).mul_(skipped)
        torch.maximum(self.sums[3], self.sums[2], out=self.sums[3])

    def read(self) -> dict[str, float | str]:
        """The figures since the last call, over all processes; call it on all of them.

        Returns `loss` (mean over steps), `samples` (running digest of the ids fed, hexadecimal), `samples_per_second`,
        `tokens_per_second` (real tokens, for sequences), `data_wait` (share of the time, mean over processes),
        `skipped_updates` (since the run began); with `flops` also `tflops_per_second`, and `mfu`, its share of what the
        hardware can do, where that is known.
        """
        seconds = time.perf_counter() - self.window_started
        totals = self._reduce()
        figures: dict[str, float | str] = {
            "loss": totals["loss"] / max(self.steps, 1),
            "samples": totals["digest"],
            "samples_per_second": totals["samples"] / seconds,
            "data_wait": totals["waited"] / self.accelerator.num_processes / seconds,
            "skipped_updates": totals["skipped"],
        }
        if self.lengths is not None:
            figures["tokens_per_second"] = totals["tokens"] / seconds
        if self.flops is not None:
            figures["tflops_per_second"] = totals["operations"] / seconds / 1e12
            if peak := peak_flops(self.accelerator):
                figures["mfu"] = totals["operations"] / seconds / peak
        self.total_samples += totals["samples"]
        self.total_tokens += totals["tokens"]
        self.steps = self.samples = self.tokens = 0
        self.operations = 0.0
        self.sums[0] = self.sums[3] = 0
        self.window_started, self.window_waited = time.perf_counter(), self.seconds_waited()
        self.most_skipped_in_a_row = totals["most_in_a_row"]
        return figures

    def refuse_divergence(self, output_dir: str) -> None:
        """End the run if ten updates in a row were skipped before the last reading.

        Raises:
            UserError: says so, and names the last checkpoint.
        """
        if self.most_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            saved = checkpoints.complete(output_dir)
            raise UserError(
                f"the gradients of {self.most_skipped_in_a_row} steps in a row were not finite, and their updates were "
                "skipped: lower --learning_rate, or use --mixed_precision bf16 or no; last good checkpoint: "
                f"{saved[max(saved)] if saved else 'none'}"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, the same on every process; call it on all of them."""
        totals = self._reduce()
        return totals | {
            "steps": self.steps,
            "total_samples": self.total_samples + totals["samples"],
            "total_tokens": self.total_tokens + totals["tokens"],
        }

    def summary(self, seconds: float) -> dict[str, float]:
        """The figures of a run that took `seconds`, for the last line of metrics.jsonl; call it on all processes."""
        state = self.state()
        rates = {"train_runtime": seconds, "train_samples_per_second": state["total_samples"] / seconds}
        if self.lengths is not None:
            rates["train_tokens_per_second"] = state["total_tokens"] / seconds
        return rates

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's figures, so that the digest and the next mean are those of one run."""
        self.steps = state["steps"]
        self.total_samples, self.total_tokens = state["total_samples"], state["total_tokens"]
        self.sums[1:] = torch.tensor([state["skipped"], state["in_a_row"], state["most_in_a_row"]]).to(self.sums)
        if self.accelerator.is_main_process:  # sums over processes: one of them goes on from the whole
            self.digest = int(state["digest"], 16)
            self.sums[0] = state["loss"]

    def _reduce(self) -> dict[str, Any]:
        """Sums over all processes since the last reading; one host wait and one collective call."""
        self._count_fed()
        loss, skipped, in_a_row, most_in_a_row = self.sums.tolist()
        waited = self.seconds_waited() - self.window_waited
        # The digest travels as two halves, so that sums in float64 are exact.
        mine = [loss, self.digest >> 32, self.digest & 0xFFFFFFFF, self.samples, self.tokens, waited, self.operations]
        totals = torch.tensor(mine, dtype=torch.float64, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals, "sum")
        loss, high, low, samples, tokens, waited, operations = totals.tolist()
        return {
            "loss": loss,
            "digest": f"{((int(high) << 32) + int(low)) & _MASK:016x}",
            "samples": int(samples),
            "tokens": int(tokens),
            "waited": waited,
            "operations": operations,
            "skipped": int(skipped),
            "in_a_row": int(in_a_row),
            "most_in_a_row": int(most_in_a_row),
        }

    def _count_fed(self) -> None:
        """Count the samples fed and take their ids into the digest: once per reading, not in every step."""
        if not self.fed:
            return
        samples = np.concatenate([m.samples for m in self.fed])
        epochs = np.concatenate([m.epochs for m in self.fed])
        steps = np.repeat([m.step for m in self.fed], [len(m.samples) for m in self.fed])
        ids = hash64(steps.astype(np.uint64), epochs.astype(np.uint64), samples.astype(np.uint64))
        self.digest = (self.digest + int(ids.sum())) & _MASK  # a sum: neither order nor process matters
        self.samples += len(samples)
        self.tokens += 0 if self.lengths is None else int(self.lengths[samples].sum())
        self.operations += 0 if self.flops is None else float(self.flops[samples].sum())
        self.fed = []
