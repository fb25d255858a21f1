"""Write the table of benchmarks into docs/performance.md, from the JSON files in benchmarks/results.

    python benchmarks/results_table.py

Each row is one comparison with its minimum and its target. If the file is missing, or lacks a contestant, the row has
"not measured" and the command that measures it.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.launching import ROOT

RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/performance.md"
START, END = "<!-- benchmarks/results_table.py writes this table -->", "<!-- end of the table -->"
TUNED = ("group_by_length", "bare_tuned", "accelerate_tuned", "fabric_tuned")
Report = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A row of the table."""

    name: str
    minimum: str
    target: str
    file: str  # in benchmarks/results
    measured: Callable[[Report], str]  # raises KeyError if the file lacks a figure
    command: str


def interval(found: Report, form: str = ".2f") -> str:
    """`1.02 (1.01 to 1.06)`: a median and its interval or extremes, of a `summary` or of nlp_peers.py's ratios."""
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
    """The ratio to the fastest tuned peer.

    Raises:
        KeyError: the report lacks a tuned peer.
    """
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


def independent_runs(report: Report) -> str:
    return interval(report["comparisons"]["together / apart"])


def launch_to_first_step(report: Report) -> str:
    return interval(report["comparisons"]["launch to first step, ours / trainer"])


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


PEERS = "python benchmarks/nlp_peers.py --rounds 5 --global_batch_size 256 --max_tokens_per_micro_batch 1024"
COMPARISONS = (
    Comparison(
        "loop cost per optimizer step over a bare loop, one process, thread CPU time",
        *("≤ +60 µs", "≤ +10 µs", "loop_cost.json", loop_cost),
        "python benchmarks/loop_cost.py --rounds 5",
    ),
    Comparison(
        "same micro-batches as a bare DDP loop, speed; weights equal to the bit",
        *("≥ 0.99", "≥ 0.998", "bare_loop_same_batches.json", same_batches),
        "python benchmarks/bare_loop_same_batches.py --rounds 5",
    ),
    Comparison(
        "sequence classification, fp32, against the best tuned peer / bare DDP",
        *("≥ 1.0 / ≥ 2.1", "≥ 1.15 / ≥ 2.6", "peers_fp32.json", classification),
        f"{PEERS} --benchmarks nlp",
    ),
    Comparison(
        "the same in bf16, against the best tuned peer in bf16",
        *("≥ 1.1", "≥ 1.6", "peers_bf16.json", best_tuned),
        f"{PEERS} --benchmarks nlp --mixed_precision bf16 --rows 16",
    ),
    Comparison(
        "masked language model, against Trainer as shipped / tuned",
        *("≥ 2.0 / ≥ 1.5", "≥ 5 / ≥ 2.5", "mlm_cpu.json", masked),
        "python benchmarks/mlm_peers.py --rounds 5",
    ),
    Comparison(
        "model FLOP/s over the measured matrix product, fp32 / bf16",
        *("≥ 65 % / ≥ 45 %", "≥ 85 % / ≥ 70 %", "utilisation.json", utilisation),
        "python benchmarks/utilisation.py --rounds 5",
    ),
    Comparison(
        "two processes over two independent ones",
        *("≥ 0.96", "≥ 0.99", "independent_runs.json", independent_runs),
        "python benchmarks/independent_runs.py --rounds 5",
    ),
    Comparison(
        "evaluation pass over Trainer.evaluate, time",
        *("≤ 0.5", "≤ 0.3", "peers_eval.json", evaluation),
        f"{PEERS} --benchmarks eval",
    ),
    Comparison(
        "launch to first step over Trainer's, under torchrun, caches warm, time",
        *("≤ 0.8", "≤ 0.5", "launch_to_first_step.json", launch_to_first_step),
        "python benchmarks/launch_to_first_step.py --rounds 5",
    ),
    Comparison(
        "checkpoint stall over accelerator.save_state / a plain copy of the bytes",
        *("≤ 0.20", "≤ 1.15 of the copy", "checkpoints_cpu.json", checkpoint),
        "python benchmarks/checkpoints.py --rounds 31 --output_dir out/checkpoints",
    ),
    Comparison(
        "peak memory per process over Trainer's",
        *("≤ 1.0", "≤ 0.7", "peers_fp32.json", memory),
        f"{PEERS} --benchmarks nlp",
    ),
)


def row_of(comparison: Comparison) -> str:
    """The row: the figures with date, file and command; or "not measured" and the command."""
    path = RESULTS / comparison.file
    try:
        report = json.loads(path.read_text())
        measured = comparison.measured(report)
        command = report.get("command", comparison.command)
        link = f"[{comparison.file}](../benchmarks/results/{comparison.file})"
        source = f"{report['machine']['date'][:10]}, {link}: `{command}`"
    except (FileNotFoundError, KeyError):
        measured, source = "not measured", f"`{comparison.command}`"
    return f"| {comparison.name} | {comparison.minimum} | {comparison.target} | {measured} | {source} |"


def table() -> str:
    """All comparisons as Markdown."""
    head = [
        "| benchmark | minimum | target | measured: median (95 % interval or extremes) | by |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(row_of, COMPARISONS)])


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} lacks the line {START} or the line {END}"
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")
    print(table())


if __name__ == "__main__":
    main()
