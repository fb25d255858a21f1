"""The table at the end of a run: which share of its time went where, and the flags that could change that."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean as mean
from typing import Any

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
SHORT = 60.0  # seconds; a shorter run spends its time on one-time work, such as imports for the first evaluation
SHARES = ("forward_backward", "data_wait", "communication", "optimizer")  # of the time of the steps, in a training line


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
        padding = mean([line["padding"] for line in lines if "padding" in line] or [0.0])
        rows += advice(shares, padding, compressed, unpacked)
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
    ("mfu", "MFU {:.0f} %", 100, mean),
    ("padding", "padding {:.1f} %", 100, mean),
    ("peak_memory_bytes", "peak memory {:,.0f} MiB per process", 2**-20, max),
    # Without the first reading, if there are others: its steps load kernels and make the optimizer.
    ("host_bound", "host-bound {:.0f} %", 100, lambda values: mean(values[1:] or values)),
)


def advice(shares: Mapping[str, float], padding: float, compressed: bool, unpacked: bool) -> list[str]:
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
