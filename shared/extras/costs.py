"""What the steps of a run cost: the share of the time for each part, padding, memory, and slow processes.

`breakdown` says so at the end of a run, with the flags that could change it. `Profiler`, for --profile, says what the
operators of a few steps cost.

The time is that of the device that computes, and the host does not wait for the device. The time between two marks
belongs to the second mark, so no time is counted twice. On a CPU a mark reads the clock. On a GPU it records an event
in the current stream; the events are read when the host has to wait for the device anyway.
"""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, profiler

from shared.errors import count_of
from shared.monitoring.hooks import Hook

BEHIND = 0.1  # a process that works longer than the others by more than this share is named
COMPUTED = ("forward_backward", "communication", "optimizer")  # parts in which a GPU should have work waiting for it
CAUGHT_UP = 1e-3  # seconds; a GPU that is less than this behind the host has run out of work
TRUSTED = 10.0  # seconds; the clocks of host and GPU drift apart by some 0.01 % of the time that passes
WARMUP = 2  # steps of this process before a profile: allocators and caches settle
MOST_EXPENSIVE = 10  # operators
Lines = Sequence[Mapping[str, Any]]
NAMES = {
    "forward_backward": "compute",
    "data_wait": "data",
    "communication": "communication",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "rest": "outside the model",
}
PARTS = (*NAMES, "profile")
SHORT = 60.0  # seconds; a shorter run spends its time on one-time work, such as imports for the first evaluation
SHARES = ("data_wait", *COMPUTED)  # of the time of the steps, in a training line


class Costs(Hook):
    """Times the parts of each step, and adds `costs` to metrics.jsonl.

    Hooks of the model mark the arrival of the data and, in a backward pass, the end of the last gradient. The time
    between the last gradient of this process and the end of the synchronized backward pass is the exposed
    communication: transfers that no computation overlaps, and waiting for slower processes. The last gradient is that
    of one parameter, found in the first pass, and a hook of that parameter makes the mark. So DDP's all-reduce and its
    bits are unchanged. FSDP computes no gradient of a whole parameter, so there the communication is unknown. After the
    first forward pass of a micro-batch all is computation, also what comes between two passes.
    """

    def begun(self, run: Any) -> None:
        """Start the stopwatch, and hook the model, so that data and gradients are timed."""
        model, self.loader, self.device = run.model, run.loader, run.accelerator.device
        self.stopwatch, self.is_sequence = Stopwatch(self.device), run.lengths is not None
        self.sees_communication = isinstance(model, nn.parallel.DistributedDataParallel)
        self.latest: Tensor | None = None  # the parameter with the last gradient
        self.in_pass = False  # since a forward pass of a micro-batch that has not ended
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        parameters = [p for p in model.parameters() if p.requires_grad] if self.sees_communication else []
        self.finding = [p.register_post_accumulate_grad_hook(self._gradients_are_there) for p in parameters]
        self._begin_reading()

    def passed(self, part: str) -> None:
        if part not in ("micro_batch", "last_micro_batch"):
            self.stopwatch.mark(part)
            return
        synchronized = part == "last_micro_batch" and self.sees_communication
        self.stopwatch.mark("communication" if synchronized else "forward_backward")
        self.in_pass = False
        if self.finding and self.latest is not None:
            for handle in self.finding:
                handle.remove()
            self.finding = []
            self.latest.register_post_accumulate_grad_hook(self._gradients_are_there)

    def measured(self) -> dict[str, float]:
        """The seconds of each part since the last reading, positions, and memory."""
        parts = self.stopwatch.read()
        waited = self.loader.seconds_waited - self.waited_before
        if self.stopwatch.on_gpu:  # waiting of the host while the GPU was busy cost nothing
            waited = min(waited, parts["data_wait"])
        if self.device.type == "cuda":  # bytes of its allocator, else resident ones
            peak, now = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        else:
            peak, now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, psutil.Process().memory_info().rss
        memory = {"peak_memory": peak, "reserved_memory": now}
        return parts | memory | {"data_wait": waited, "positions": self.positions}

    def figures(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """See `costs`; the next reading begins here."""
        self._begin_reading()
        return costs(rows)

    def _begin_reading(self) -> None:
        self.stopwatch.seconds = dict.fromkeys(self.stopwatch.seconds, 0.0)
        self.waited_before = self.loader.seconds_waited
        self.positions = 0  # rows x longest row, over the batches in training; rows where samples are not sequences

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:  # without DDP's wrapper, evaluation calls this hook as well
            self.stopwatch.mark("forward_backward" if self.in_pass else "data_wait")
            self.in_pass = True
            if torch.is_grad_enabled():  # else the pass is made again
                self.positions += positions_of(args, kwargs, self.is_sequence)

    def _gradients_are_there(self, parameter: Tensor) -> None:
        self.latest = parameter
        self.stopwatch.mark("forward_backward")


def positions_of(args: tuple[Any, ...], kwargs: dict[str, Any], is_sequence: bool) -> int:
    """Rows x longest row of a model's batch; its rows where samples are no sequences."""
    shape = next(value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return shape[0] * shape[1] if is_sequence else shape[0]


def costs(rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """What the steps since the last reading cost, from the figures of all processes (each [processes]).

    Shares are parts of the time of the steps, averaged over processes; docs/outputs.md has the definitions.
    """
    mean = dict(zip(rows, np.mean([*rows.values()], axis=1).tolist(), strict=True))
    seconds = mean["seconds"]
    figures = {
        **{part: mean[part] / seconds for part in SHARES},
        "peak_memory_bytes": rows["peak_memory"].max(),
        "reserved_memory_bytes": rows["reserved_memory"].max(),
    }
    if rows["tokens"].any() and rows["positions"].any():
        figures["padding"] = 1 - rows["tokens"].sum() / rows["positions"].sum()
    if "watched" in rows and rows["watched"].any():
        figures["host_bound"] = rows["starved"].sum() / rows["watched"].sum()
    work = rows["data_wait"] + rows["forward_backward"] + rows["optimizer"]
    if len(work) > 1 and work.min() > 0:
        slowest = int(work.argmax())
        behind = work[slowest] / np.delete(work, slowest).mean() - 1
        if behind > BEHIND:
            figures |= {"slowest_process": slowest, "slowest_process_behind": behind}
    return {name: float(value) for name, value in figures.items()}


class Stopwatch:
    """Adds up the time between marks, by the name of the mark that ends it.

    On a GPU it adds up two more times, over the parts that are computed there: `watched`, for which the lag of the GPU
    behind the host is known, and `starved`, the part of `watched` at whose end the GPU had caught up with the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.seconds = dict.fromkeys((*PARTS, "watched", "starved") if self.on_gpu else PARTS, 0.0)
        self.last = time.perf_counter()
        self.events: list[tuple[str, Any, float]] = []  # part, event, the host's time when it was recorded
        if self.on_gpu:
            self.mark("rest")

    def mark(self, part: str) -> None:
        """Count the time since the last mark as `part`, one of `PARTS`."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((part, event, time.perf_counter()))
        else:
            now = time.perf_counter()
            self.seconds[part] += now - self.last
            self.last = now

    def read(self) -> dict[str, float]:
        """Seconds of each part since they were set to zero. On a GPU this waits for the last mark.

        The last mark of the previous call was made when the GPU had no work left, so the clocks of host and GPU are
        compared from there.
        """
        if self.events:
            self.events[-1][1].synchronize()
            _, first, began = self.events[0]
            for (_, start, _), (part, end, told) in pairwise(self.events):
                seconds = start.elapsed_time(end) / 1000
                self.seconds[part] += seconds
                if part in COMPUTED and told - began < TRUSTED:
                    self.seconds["watched"] += seconds
                    behind = first.elapsed_time(end) / 1000 - (told - began)
                    self.seconds["starved"] += seconds * (behind < CAUGHT_UP)
            self.events = self.events[-1:]
        return dict(self.seconds)


class Profiler(Hook):
    """Profiles `config.profile` steps of this process into OUTPUT_DIR/profile.

    Writes trace-RANK.json, which chrome://tracing and Perfetto show, and operators-RANK.txt, the ten operators that
    took most time of their own.
    """

    running: Any = None  # a torch.profiler.profile, until its last step has ended

    def begun(self, run: Any) -> None:
        self.run, self.accelerator, self.steps = run, run.accelerator, run.config.profile
        self.folder = Path(run.config.output_dir) / "profile"
        schedule = profiler.schedule(wait=WARMUP - 1, warmup=1, active=self.steps, repeat=1)
        self.running = profiler.profile(schedule=schedule, on_trace_ready=self.write)
        self.running.record_steps = False  # a step is not an operator: it would head the table
        self.running.start()

    def step_ended(self) -> None:
        """Count a step; PyTorch's profiler starts and stops where the profile begins or ends."""
        if not self.running:
            return
        with self.run.monitor.timed("profile"):  # the time to start it and to write its files is not part of a step
            self.running.step()
        if self.running.step_num == WARMUP + self.steps:
            self.running = None

    def closed(self) -> None:
        """If the run ends before the profile does, write what there is."""
        if not self.running:
            return
        done = count_of(self.running.step_num, "step")
        self.accelerator.print(f"--profile: the run ended before the profile, after {done}")
        self.running.stop()
        self.running = None

    def write(self, profile: Any) -> None:
        """Write the files of a profile that has stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = self.accelerator.process_index
        profile.export_chrome_trace(str(self.folder / f"trace-{rank}.json"))
        by = "self_cuda_time_total" if self.accelerator.device.type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=MOST_EXPENSIVE, max_name_column_width=60)
        (self.folder / f"operators-{rank}.txt").write_text(table + "\n")
        self.accelerator.print(f"profile of {count_of(profile.step_num - WARMUP, 'step')} in {self.folder}")


# At the end of a run


def seconds_by_part(lines: Lines) -> dict[str, float]:
    """Seconds of each part, by the keys of `NAMES`, from the lines of a metrics.jsonl; empty without a timed line."""
    timed = [line for line in lines if "step_seconds" in line]
    if not timed:
        return {}
    spent = dict.fromkeys(NAMES, 0.0)
    for before, line in pairwise([{"step": 0}, *timed]):
        seconds = line["step_seconds"] * line.get("timed_steps", line["step"] - before["step"])
        for part in SHARES:
            spent[part] += line.get(part, 0.0) * seconds
        spent["rest"] += (1 - sum(line.get(part, 0.0) for part in SHARES)) * seconds
    for part in ("evaluation", "checkpoint"):  # the summary has those after the last reading
        spent[part] += sum(line.get(f"{part}_seconds", 0.0) for line in lines)
    return spent


def breakdown(lines: Lines, compressed: bool = False, unpacked: bool = False) -> str:
    """Where the time of a run went, from its metrics.jsonl (`log.read_metrics`); "" when nothing was timed.

    A run of less than a minute gets no advice. `compressed`: whether --gradient_compression has nothing to offer.
    `unpacked`: whether the recipe has --packing and it is off.
    """
    spent = seconds_by_part(lines)
    if not (total := sum(spent.values())):
        return ""
    shares = {part: seconds / total for part, seconds in spent.items()}
    shown = ", ".join(f"{100 * share:.0f} % {NAMES[part]}" for part, share in shares.items() if share >= 0.005)
    rows = [f"where {total:,.1f} s went: {shown}", *facts(lines)]
    if total >= SHORT:
        padding = fmean([line["padding"] for line in lines if "padding" in line] or [0.0])
        rows += advice_on_time(shares, padding, compressed, unpacked)
    return "\n".join(f"  {row}" for row in rows)


def facts(lines: Lines) -> list[str]:
    """What a run that has been timed says besides the parts of its time: rows of text."""
    timed = [line for line in lines if "step_seconds" in line]
    told = [
        text.format(scale * summary([line[key] for line in timed if key in line]))
        for key, text, scale, summary in FACTS
        if key in timed[-1]
    ]
    rows = [", ".join(told)] if told else []
    behind = [line["slowest_process"] for line in timed if "slowest_process" in line]
    if behind:
        often = max(set(behind), key=behind.count)
        times = f"{behind.count(often)} of {len(timed)} readings"
        rows.append(f"process {often:.0f} was over 10 % behind the others in {times}")
    if skipped := lines[-1].get("skipped_updates"):  # in the summary only where there are any
        scale = f" (loss scale at the end {lines[-1]['loss_scale']:,.0f})" if "loss_scale" in lines[-1] else ""
        steps = f"{skipped:,.0f} of {lines[-1]['step']:,} updates"
        rows.append(f"{steps} were skipped, because their gradients were not finite{scale}")
    return rows


FACTS: tuple[tuple[str, str, float, Callable[[Sequence[float]], float]], ...] = (
    ("mfu", "MFU {:.0f} %", 100, fmean),
    ("padding", "padding {:.1f} %", 100, fmean),
    ("peak_memory_bytes", "peak memory {:,.0f} MiB per process", 2**-20, max),
    # Without the first reading, if there are others: its steps load kernels and make the optimizer.
    ("host_bound", "host-bound {:.0f} %", 100, lambda values: fmean(values[1:] or values)),
)


def advice_on_time(shares: Mapping[str, float], padding: float, compressed: bool, unpacked: bool) -> list[str]:
    """One line for each share that a flag of the run can lower; flags that keep the run the same come first."""
    found = []
    if shares["data_wait"] > 0.1:
        found.append("the steps wait for data: a larger --dataloader_num_workers reads ahead with more processes")
    if shares["communication"] > 0.2:
        found.append(
            "the steps wait for gradients of other processes: a larger --global_batch_size sends them less often"
            + ", --gradient_compression bf16 sends half the bytes" * (not compressed)
        )
    if padding > 0.15:
        found.append(
            "much of the computation is on padding: "
            + "--packing leaves it out of the same batches, " * unpacked
            + "a larger --global_batch_size has more samples of similar length"
        )
    return [f"advice: {line}" for line in found]
