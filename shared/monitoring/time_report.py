"""The table at the end of a run: which share of its time went where, and the flag that could change that."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shared.errors import count_of

Lines = Sequence[Mapping[str, Any]]
NAMES = {
    "forward_backward": "compute",
    "data_wait": "data",
    "communication": "communication",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "rest": "rest",
}
SHORT = 60.0  # seconds; a shorter run spends its time on one-time work, such as imports for the first evaluation
HOST_BOUND = 0.5  # of the GPU's computing time; above this share it mostly waits for the host
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


def of_last_processes(lines: Lines) -> tuple[Lines, str]:
    """The lines since a start on another number of processes, and that they are; all lines and "" without one."""
    timed = [number for number, line in enumerate(lines) if "step_seconds" in line]
    numbers = [lines[number].get("processes") for number in timed]
    changes = [after for before, after in pairwise(range(len(timed))) if numbers[before] != numbers[after]]
    if not changes:
        return lines, ""
    return lines[timed[changes[-1]] :], f" on {count_of(numbers[-1] or 0, 'process', 'processes')}"


def breakdown(lines: Lines, compressed: bool = False, compiled: bool = False) -> str:
    """Where the time of a run went, from its metrics.jsonl (`tracking.read_metrics`); "" when nothing was timed.

    After a resume on another number of processes, only the time since then counts.

    A run of less than a minute gets advice only if its GPU mostly waited for the host. `compressed`: whether its
    gradients were sent in half the bytes. `compiled`: whether its layers were compiled.
    """
    lines, where = of_last_processes(lines)
    spent = seconds_by_part(lines)
    if not (total := sum(spent.values())):
        return ""
    shares = {part: seconds / total for part, seconds in spent.items()}
    whole = rounded(shares)
    shown = ", ".join(f"{whole[part]} % {name}" for part, name in NAMES.items() if whole[part] or part == "rest")
    timed = [line for line in lines if "step_seconds" in line]
    rows = [f"where {total:,.1f} s{where} went: {shown}"]
    facts = {
        "mfu": ("MFU", lambda values: f"{sum(values) / len(values):.0%}".replace("%", " %")),
        "padding": ("padding", lambda values: f"{sum(values) / len(values):.1%}".replace("%", " %")),
        "peak_memory_bytes": ("peak memory", lambda values: f"{max(values) / 2**20:,.0f} MiB per process"),
        "gpu_utilization": ("GPU busy", lambda values: f"{sum(values) / len(values):.0%}".replace("%", " %")),
        "host_bound": ("host-bound", lambda values: f"{settled(values):.0%}".replace("%", " %")),
    }
    told = {
        name: say([line[key] for line in timed if key in line])
        for key, (name, say) in facts.items()
        if key in timed[-1]
    }
    rows += [", ".join(f"{name} {value}" for name, value in told.items())] if told else []
    behind = [line["slowest_process"] for line in timed if "slowest_process" in line]
    if behind:
        often = max(set(behind), key=behind.count)
        times = f"{behind.count(often)} of {len(timed)} readings"
        rows.append(f"process {often:.0f} was over 10 % behind the others in {times}")
    if skipped := lines[-1].get("skipped_updates"):  # in the summary only where there are any
        scale = f" (loss scale at the end {lines[-1]['loss_scale']:,.0f})" if "loss_scale" in lines[-1] else ""
        steps = f"{skipped:,.0f} of {lines[-1]['step']:,} updates"
        rows.append(f"{steps} were skipped, because their gradients were not finite{scale}")
    rows += advice(shares, timed, compressed, compiled) if total >= SHORT else advice_on_host(timed, compiled)
    return "\n".join(f"  {row}" for row in rows)


def rounded(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares in whole percent that add up to 100: each is rounded down, and those that lost most get one more."""
    whole = {part: int(100 * share) for part, share in shares.items()}
    for part in sorted(shares, key=lambda part: whole[part] - 100 * shares[part])[: 100 - sum(whole.values())]:
        whole[part] += 1
    return whole


def mean(timed: Lines, key: str) -> float | None:
    """Mean over the readings that have this figure; None if no reading has it."""
    values = [line[key] for line in timed if key in line]
    return sum(values) / len(values) if values else None


def settled(values: Sequence[float]) -> float:
    """Mean over the readings without the first, if there are others: its steps load kernels and make the optimizer."""
    values = values[1:] or values
    return sum(values) / len(values)


def flag_of_micro_batch(timed: Lines) -> str:
    """The flag for the size of a micro-batch: in tokens if the samples are sequences, else in samples."""
    text = any("tokens_per_second" in line for line in timed)
    return "--max_tokens_per_micro_batch" if text else "--per_device_train_batch_size"


def advice_on_host(timed: Lines, compiled: bool = False) -> list[str]:
    """A line that names the flags if the GPU waited for the host in more than half of its computing time, else []."""
    values = [line["host_bound"] for line in timed if "host_bound" in line]  # measured on a GPU only
    if not values or settled(values) <= HOST_BOUND:
        return []
    return [
        f"advice: the GPU waits for the host to launch its kernels: a larger {flag_of_micro_batch(timed)} (or "
        "--global_batch_size, if each step has one micro-batch) gives each kernel more work"
        + ", --torch_compile launches fewer kernels"
        * (not compiled)
    ]


def advice(shares: Mapping[str, float], timed: Lines, compressed: bool = False, compiled: bool = False) -> list[str]:
    """One line for each share that is large, naming the flag."""
    found = []
    on_host = advice_on_host(timed, compiled)
    if shares["data_wait"] > 0.1:
        found.append("the steps wait for data: a larger --dataloader_num_workers reads ahead with more processes")
    if shares["communication"] > 0.2:
        found.append(
            "the steps wait for gradients of other processes: a larger --global_batch_size sends them less often"
            + ", --gradient_compression bf16 sends half the bytes" * (not compressed)
        )
    if shares["optimizer"] > 0.2:
        found.append("updates take a large share of the time: a larger --global_batch_size needs fewer of them")
    if shares["checkpoint"] > 0.1:
        found.append("checkpoints delay the steps: save less often with a larger --checkpointing_steps")
    if shares["evaluation"] > 0.3:
        found.append("evaluation takes a large share of the time: evaluate less often with a larger --eval_steps")
    if shares["rest"] > 0.2 and not on_host:
        larger = flag_of_micro_batch(timed)
        found.append(f"much time is spent outside the computation: make the micro-batches larger with {larger}")
    if (mean(timed, "padding") or 0) > 0.15:
        found.append(
            "much of the computation is on padding: a larger --global_batch_size has more samples of similar length"
        )
    return on_host + [f"advice: {line}" for line in found]
