"""What the steps of a run cost: the share of the time for each part, padding, memory, and slow processes."""

import importlib.util
import math
import os
import resource
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from shared.extras.step_timer import PassTimer, Stopwatch
from shared.monitoring.hooks import Hook

BEHIND = 0.1  # a process that works longer than the others by more than this share is named


class Costs(Hook):
    """Times the parts of each step, and adds `costs` to metrics.jsonl."""

    def begun(self, run: Any) -> None:
        """Start the stopwatch, and hook the model, so that data and gradients are timed."""
        self.run, self.device = run, run.accelerator.device
        self.stopwatch = Stopwatch(self.device)
        self.passes = PassTimer(run.model, self.stopwatch, sequences=run.lengths is not None)
        self.before = self._totals()

    def passed(self, part: str) -> None:
        """Count the time since the last mark."""
        if part in ("micro_batch", "last_micro_batch"):
            self.passes.end(synchronized=part == "last_micro_batch")
        else:
            self.stopwatch.mark(part)

    def measured(self) -> dict[str, float]:
        """The seconds of each part since the last reading, positions, and memory."""
        parts = {part: seconds - self.before[part] for part, seconds in self._totals().items()}
        waited, positions = parts.pop("waited"), parts.pop("positions")
        if self.stopwatch.on_gpu:  # waiting of the host while the GPU was busy cost nothing
            waited = min(waited, parts["data"])
        peak_memory, reserved_memory = memory(self.device)
        return parts | {
            "data": waited,
            "positions": positions,
            "peak_memory": peak_memory,
            "reserved_memory": reserved_memory,
            "utilization": utilization(self.device),
        }

    def figures(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """See `costs`; the next reading begins here."""
        self.before = self._totals()
        return costs(rows)

    def _totals(self) -> dict[str, float]:
        """Running totals since the start."""
        return self.stopwatch.read() | {
            "waited": self.run.loader.seconds_waited,
            "positions": float(self.passes.positions),
        }


def costs(rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """What the steps since the last reading cost, from the figures of all processes (each [processes]).

    Shares are parts of the time of the steps, averaged over processes; docs/outputs.md has the definitions.
    """
    mean = dict(zip(rows, np.mean([*rows.values()], axis=1).tolist(), strict=True))
    seconds = mean["seconds"]
    figures = {
        "data_wait": mean["data"] / seconds,
        **{part: mean[part] / seconds for part in ("forward_backward", "communication", "optimizer")},
        "peak_memory_bytes": rows["peak_memory"].max(),
        "reserved_memory_bytes": rows["reserved_memory"].max(),
    }
    if rows["tokens"].any() and rows["positions"].any():
        figures["padding"] = 1 - rows["tokens"].sum() / rows["positions"].sum()
    if not math.isnan(mean["utilization"]):
        figures["gpu_utilization"] = mean["utilization"]
    if "watched" in rows and rows["watched"].any():
        figures["host_bound"] = rows["starved"].sum() / rows["watched"].sum()
    work = rows["data"] + rows["forward_backward"] + rows["optimizer"]
    if len(work) > 1 and work.min() > 0:
        slowest = int(work.argmax())
        behind = work[slowest] / np.delete(work, slowest).mean() - 1
        if behind > BEHIND:
            figures |= {"slowest_process": slowest, "slowest_process_behind": behind}
    return {name: float(value) for name, value in figures.items()}


def memory(device: torch.device) -> tuple[int, int]:
    """Peak and current bytes of this process: of the CUDA allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, this_process(os.getpid()).memory_info().rss


@cache
def this_process(pid: int) -> psutil.Process:
    """A process, looked up once: psutil reads three files to make sure which one it is."""
    return psutil.Process(pid)


def utilization(device: torch.device) -> float:
    """Share of the last second in which the GPU was busy, as NVML says; NaN without GPU or pynvml, or if it fails."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return math.nan
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # pynvml's errors: a part of a GPU (MIG) has no such figure, nor has a container without NVML
        return math.nan
