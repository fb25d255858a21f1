"""Write the table of lanes into docs/performance.md, from the JSON files in benchmarks/results.

    python benchmarks/lanes.py

Each lane is what one benchmark compares, with the first bar and the goal that it has to pass. A lane whose file is not
there, or lacks the contestant, says "not measured" and the command that would measure it.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/performance.md"
START, END = "<!-- lanes: benchmarks/lanes.py writes this table -->", "<!-- end of lanes -->"
TUNED = ("group_by_length", "bare_tuned", "accelerate_tuned", "fabric_tuned")
Report = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """A row of the table."""

    name: str
    first_bar: str
    goal: str
    file: str  # in benchmarks/results
    measured: Callable[[Report], str]  # raises KeyError where the file lacks what is needed
    command: str


def interval(found: Report, form: str = ".2f") -> str:
    """`1.02 (1.01-1.06)`: median and its interval, as `rounds.summary` or `peers.ratios` gave them."""
    low, high = found.get("low", found.get("min")), found.get("high", found.get("max"))
    return f"{found['median']:{form}} ({low:{form}} to {high:{form}})"


def loop_cost(report: Report) -> str:
    found = report["comparisons"]
    names = {"accelerate": "Accelerate", "fabric": "Fabric", "trainer": "Trainer"}
    others = [f"{label} {found[f'{name} - bare, thread_us']['median']:+.0f}" for name, label in names.items()]
    return f"{interval(found['ours - bare, thread_us'], '+.0f')} µs; {', '.join(others)}"


def same_batches(report: Report) -> str:
    found = report["comparisons"]
    equal = min(found["rounds with weights equal to the bit"]["rounds"]) == 1
    return f"{interval(found['speed of ours / bare'], '.3f')}, weights {'equal' if equal else 'DIFFERENT'}"


def best_tuned(report: Report) -> str:
    """The ratio to the fastest tuned peer, all of which have to be there."""
    name = min(TUNED, key=lambda name: report["ratios"][name]["median"])
    return f"{interval(report['ratios'][name])} ({name})"


def classification(report: Report) -> str:
    return f"{best_tuned(report)} / {interval(report['ratios']['bare'])}"


def masked(report: Report) -> str:
    shipped, tuned = (report["ratios"][f"ours / {name}"] for name in ("trainer", "trainer_tuned"))
    bf16 = report["ratios"]["ours_bf16 / trainer_tuned_bf16"]
    middle = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (shipped, tuned, bf16)]
    return f"{middle[0]} / {middle[1]}; tuned, both in bf16, {middle[2]}"


def utilisation(report: Report) -> str:
    found = report["comparisons"]
    return "; ".join(
        f"{label}: {interval(found[f'mfu, {size} fp32'], '.0%')} / {interval(found[f'mfu, {size} bf16'], '.0%')}"
        for size, label in (("wide", "width 768"), ("small", "4 x 256"))
    )


def evaluation(report: Report) -> str:
    each = [turn["of_trainer"] for turn in report["evaluation"]["turns"]]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}), same values"


def checkpoint(report: Report) -> str:
    stall, extra = report["summary"]["ours_against"], report["summary"]["extra_of_ours_against"]
    return (
        f"{stall['save_state']['median']:.2f} of save_state / {stall['copy']['median']:.2f} of a plain copy; "
        f"with what the next step takes longer, {extra['save_state']:.2f} / {extra['copy']:.2f}"
    )


def memory(report: Report) -> str:
    peak = {
        name: statistics.median(row["peak_rss_mib"] for row in report["rows"] if row["contestant"] == name)
        for name in {row["contestant"] for row in report["rows"]}
    }
    return f"{peak['ours'] / peak['trainer']:.2f} ({peak['ours']:,.0f} MiB)"


PEERS = "python benchmarks/peers.py --rounds 5 --global_batch_size 256 --max_tokens_per_micro_batch 1024 --lanes nlp"
LANES = (
    Lane(
        "loop cost per optimizer step over a bare loop, one process, thread CPU time",
        *("≤ +60 µs", "≤ +10 µs", "loop_cost.json", loop_cost),
        "python benchmarks/loop_cost.py --rounds 5",
    ),
    Lane(
        "same micro-batches as a bare DDP loop, speed; weights equal to the bit",
        *("≥ 0.99", "≥ 0.998", "same_batches.json", same_batches),
        "python benchmarks/same_batches.py --rounds 5",
    ),
    Lane(
        "sequence classification, fp32, against the best tuned peer / bare DDP",
        *("≥ 1.0 / ≥ 2.1", "≥ 1.15 / ≥ 2.6", "peers_fp32.json", classification),
        PEERS,
    ),
    Lane(
        "the same in bf16, against the best tuned peer in bf16",
        *("≥ 1.1", "≥ 1.6", "peers_bf16.json", best_tuned),
        f"{PEERS} --mixed_precision bf16 --rows 16",
    ),
    Lane(
        "masked language model, against Trainer as shipped / tuned",
        *("≥ 2.0 / ≥ 1.5", "≥ 5 / ≥ 2.5", "mlm_cpu.json", masked),
        "python benchmarks/mlm_peers.py --rounds 5",
    ),
    Lane(
        "model FLOP/s over the measured matrix product, fp32 / bf16",
        *("≥ 65 % / ≥ 45 %", "≥ 85 % / ≥ 70 %", "utilisation.json", utilisation),
        "python benchmarks/utilisation.py --rounds 5",
    ),
    Lane(
        "two processes over two independent ones",
        *("≥ 0.96", "≥ 0.99", "independent.json", lambda report: interval(report["comparisons"]["together / apart"])),
        "python benchmarks/independent.py --rounds 5",
    ),
    Lane(
        "evaluation pass over Trainer.evaluate, time",
        *("≤ 0.5", "≤ 0.3", "peers_eval.json", evaluation),
        "python benchmarks/peers.py --rounds 5 --lanes eval --max_tokens_per_micro_batch 1024",
    ),
    Lane(
        "launch to first step over Trainer's, under torchrun, caches warm, time",
        *("≤ 0.8", "≤ 0.5", "startup.json"),
        lambda report: interval(report["comparisons"]["launch to first step, ours / trainer"]),
        "python benchmarks/startup.py --rounds 5",
    ),
    Lane(
        "checkpoint stall over accelerator.save_state / a plain copy of the bytes",
        *("≤ 0.20", "≤ 1.15 of the copy", "checkpoints_cpu.json", checkpoint),
        "python benchmarks/checkpoints.py --rounds 31 --output_dir out/checkpoints",
    ),
    Lane(
        "peak memory per process over Trainer's",
        *("≤ 1.0", "≤ 0.7", "peers_fp32.json", memory),
        PEERS,
    ),
)


def row_of(lane: Lane) -> str:
    """The lane as a row: what was measured with its date and file, or that it was not and the command that would."""
    path = RESULTS / lane.file
    try:
        report = json.loads(path.read_text())
        measured = lane.measured(report)
        command = report.get("command", lane.command)
        source = f"{report['machine']['date'][:10]}, [{lane.file}](../benchmarks/results/{lane.file}): `{command}`"
    except (FileNotFoundError, KeyError):
        measured, source = "not measured", f"`{lane.command}`"
    return f"| {lane.name} | {lane.first_bar} | {lane.goal} | {measured} | {source} |"


def table() -> str:
    """All lanes as Markdown."""
    head = ["| lane | first bar | goal | measured: median (95 % interval or extremes) | by |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(row_of, LANES)])


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has lost the marks of the table"
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")
    print(table())


if __name__ == "__main__":
    main()
