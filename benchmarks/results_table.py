"""Write the table of benchmarks on a CPU into docs/performance.md, from the JSON files in benchmarks/results.

    python benchmarks/results_table.py

Each row compares one figure of the recipes with one of a peer. A row whose file is missing, or lacks the contestant,
reads "not measured". The commands that measure the rows follow the table.
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
Cells = tuple[str, str, str]
NAMES = {"bare": "bare DDP", "trainer": "Trainer", "group_by_length": "Trainer, `group_by_length`"}
NAMES |= {"bare_tuned": "bare DDP, tuned", "accelerate_tuned": "Accelerate, tuned", "fabric_tuned": "Fabric, tuned"}


@dataclass(frozen=True)
class Comparison:
    """A row of the table."""

    name: str
    peer: str  # empty where the figures tell which of several it is
    minimum: str
    target: str
    file: str  # in benchmarks/results
    measured: Callable[[Report], Cells]  # ours, the peer's, their ratio; raises KeyError where the file lacks a figure
    command: str  # measures the row, where the file names no command


def interval(found: Report, form: str = ".2f") -> str:
    """`1.02 (1.01-1.06)`: median and its interval, as `rounds.summary` or nlp_peers.py gave them."""
    low, high = found.get("low", found.get("min")), found.get("high", found.get("max"))
    return f"{found['median']:{form}} ({low:{form}} to {high:{form}})"


def of_contestant(report: Report, contestant: str, key: str) -> float:
    """The median of a figure over a contestant's rounds."""
    rounds = [row[key] for row in report["rows"] if row["contestant"] == contestant]
    if not rounds:
        raise KeyError(contestant)
    return statistics.median(rounds)


def loop_cost(report: Report) -> Cells:
    found = report["comparisons"]
    names = {"accelerate": "Accelerate", "fabric": "Fabric", "trainer": "Trainer"}
    others = [f"{label} {found[f'{name} - bare, thread_us']['median']:+.0f} µs" for name, label in names.items()]
    return f"{interval(found['ours - bare, thread_us'], '+.0f')} µs", ", ".join(others), "-"


def same_batches(report: Report) -> Cells:
    found = report["comparisons"]
    equal = min(found["rounds with weights equal to the bit"]["rounds"]) == 1
    ratio = f"{interval(found['speed of ours / bare'], '.3f')}, weights {'equal' if equal else 'DIFFERENT'}"
    ours, bare = (f"{of_contestant(report, name, 'step_seconds'):.3f} s per step" for name in ("ours", "bare"))
    return ours, bare, ratio


def tokens_against(peer: str | None = None, ours: str = "ours") -> Callable[[Report], Cells]:
    """Real tokens per second beside those of a peer; without its name, of the fastest tuned one."""

    def measured(report: Report) -> Cells:
        ratios = report["ratios"]
        name = peer or min(TUNED, key=lambda tuned: ratios[tuned]["median"])  # KeyError where one is missing
        ratio = ratios[name] if name in ratios else extremes(ratios[f"{ours} / {name}"])
        own, other = (of_contestant(report, contestant, "tokens_per_second") for contestant in (ours, name))
        label = "" if peer else f"{NAMES[name]}: "
        return f"{own:,.0f} tokens/s", f"{label}{other:,.0f} tokens/s", interval(ratio)

    return measured


def beside(ours: str, peer: str, comparison: str, figure: str, unit: str) -> Callable[[Report], Cells]:
    """A rate of two contestants, and their ratio."""

    def measured(report: Report) -> Cells:
        own, other = (of_contestant(report, contestant, figure) for contestant in (ours, peer))
        return f"{own:,.0f} {unit}", f"{other:,.0f} {unit}", interval(report["comparisons"][comparison])

    return measured


def tagging(peer: str) -> Callable[[Report], Cells]:
    """Real tokens per second of token_classification.py beside those of a peer."""
    comparison = f"tokens per second of ours / {peer}"
    return beside("recipes/token_classification.py", peer, comparison, "tokens_per_second", "tokens/s")


def extremes(ratios: list[float]) -> Report:
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def utilisation(size: str, precision: str) -> Callable[[Report], Cells]:
    """Model FLOP/s of the real tokens, as a share of a measured matrix product."""

    def measured(report: Report) -> Cells:
        rate = of_contestant(report, f"{size} {precision}", "tokens_per_second")
        share = interval(report["comparisons"][f"mfu, {size} {precision}"], ".0%")
        return f"{rate:,.0f} tokens/s", "", share

    return measured


def evaluation(report: Report) -> Cells:
    turns = report["evaluation"]["turns"]
    ours, trainer = (statistics.median(turn[name] for turn in turns) for name in ("ours", "trainer"))
    ratio = interval(extremes([turn["of_trainer"] for turn in turns]))
    return f"{ours:.2f} s", f"{trainer:.2f} s", f"{ratio}, same scores"


def launch_to_first_step(report: Report) -> Cells:
    ours, trainer = (of_contestant(report, name, "seconds") for name in ("ours", "trainer"))
    return f"{ours:.2f} s", f"{trainer:.2f} s", interval(report["comparisons"]["launch to first step, ours / trainer"])


def stall(peer: str) -> Callable[[Report], Cells]:
    """How long the loop stands still for a save."""

    def measured(report: Report) -> Cells:
        found = report["summary"]
        ours, other = (found["median_stall_ms"][name] for name in ("ours", peer))
        return f"{ours:.1f} ms", f"{other:.1f} ms", interval(found["ours_against"][peer])

    return measured


def delay(peer: str) -> Callable[[Report], Cells]:
    """How much later the next step ends because of a save."""

    def measured(report: Report) -> Cells:
        found = report["summary"]
        ours, other = (found["median_extra_ms"][name] for name in ("ours", peer))
        return f"{ours:.1f} ms", f"{other:.1f} ms", f"{found['extra_of_ours_against'][peer]:.2f}"

    return measured


def memory(report: Report) -> Cells:
    ours, trainer = (of_contestant(report, name, "peak_rss_mib") for name in ("ours", "trainer"))
    return f"{ours:,.0f} MiB", f"{trainer:,.0f} MiB", f"{ours / trainer:.2f}"


PEERS = "python benchmarks/nlp_peers.py --rounds 5 --global_batch_size 256 --max_tokens_per_micro_batch 1024"
MLM, CLASSES = "masked language model", "sequence classification"
FP32 = ("peers_fp32.json", f"{PEERS} --benchmarks nlp")
MLM_FP32 = ("mlm_cpu.json", "python benchmarks/mlm_peers.py --rounds 3 --contestants ours trainer trainer_tuned")
MLM_BF16 = ("mlm_bf16_cpu.json", "python benchmarks/mlm_peers.py --rounds 5")
TAGGING = ("tagging_cpu.json", "python benchmarks/tagging_peers.py --rounds 5")
EMBEDDINGS = ("embeddings_cpu.json", "python benchmarks/embeddings_peers.py --rounds 5")
UTILISATION = ("utilisation.json", "python benchmarks/utilisation.py --rounds 5")
CHECKPOINTS = ("checkpoints_cpu.json", "python benchmarks/checkpoints.py --rounds 31 --output_dir out/checkpoints")


def row(
    name: str, peer: str, minimum: str, target: str, source: tuple[str, str], measured: Callable[[Report], Cells]
) -> Comparison:
    file, command = source
    return Comparison(name, peer, minimum, target, file, measured, command)


COMPARISONS = (
    row(
        *("CPU time of the loop per optimizer step, above a bare loop, one process", "", "≤ +60 µs", "≤ +10 µs"),
        *(("loop_cost.json", "python benchmarks/loop_cost.py --rounds 5"), loop_cost),
    ),
    row(
        *("the same micro-batches as a bare loop, two processes", "bare DDP", "≥ 0.99", "≥ 0.998"),
        *(("bare_loop_same_batches.json", "python benchmarks/bare_loop_same_batches.py --rounds 5"), same_batches),
    ),
    row(f"{CLASSES}, fp32, best tuned peer", "", "≥ 1.0", "≥ 1.15", FP32, tokens_against()),
    row(f"{CLASSES}, fp32", "bare DDP", "≥ 2.1", "≥ 2.6", FP32, tokens_against("bare")),
    row(
        *(f"{CLASSES}, bf16, best tuned peer", "", "≥ 1.1", "≥ 1.6"),
        *(("peers_bf16.json", f"{PEERS} --benchmarks nlp --mixed_precision bf16 --rows 16"), tokens_against()),
    ),
    row(f"{MLM}, fp32", "Trainer as shipped", "≥ 2.0", "≥ 5", MLM_FP32, tokens_against("trainer")),
    row(f"{MLM}, fp32", "Trainer, tuned", "≥ 1.5", "≥ 2.5", MLM_FP32, tokens_against("trainer_tuned")),
    row(f"{MLM}, bf16", "Trainer, tuned", "-", "-", MLM_BF16, tokens_against("trainer_tuned_bf16", "ours_bf16")),
    row("token classification, fp32", "Trainer as shipped", "-", "-", TAGGING, tagging("Trainer")),
    row("token classification, fp32", "Trainer, tuned", "-", "-", TAGGING, tagging("Trainer, group_by_length")),
    row(
        *("sentence embeddings, fp32", "trainer of sentence-transformers", "≥ 1.3", "-", EMBEDDINGS),
        beside(
            *("recipes/embeddings.py", "sentence-transformers", "speed of ours / peer"),
            *("samples_per_second", "pairs/s"),
        ),
    ),
    *(
        row(f"MFU, {label}, {precision}", "a matrix product", *bars, UTILISATION, utilisation(size, precision))
        for size, label in (("wide", "width 768"), ("small", "4 layers of width 256"))
        for precision, bars in (("fp32", ("≥ 65 %", "≥ 85 %")), ("bf16", ("≥ 45 %", "≥ 70 %")))
    ),
    row(
        *("time of an evaluation", "`Trainer.evaluate`", "≤ 0.5", "≤ 0.3"),
        *(("peers_eval.json", f"{PEERS} --benchmarks eval"), evaluation),
    ),
    row(
        *("time from launch to first step, torchrun, warm caches", "Trainer", "≤ 0.8", "≤ 0.5"),
        *(("launch_to_first_step.json", "python benchmarks/launch_to_first_step.py --rounds 5"), launch_to_first_step),
    ),
    row("pause of the loop for a save", "`accelerator.save_state`", "≤ 0.20", "-", CHECKPOINTS, stall("save_state")),
    row("pause of the loop for a save", "plain copy of the bytes", "-", "≤ 1.15", CHECKPOINTS, stall("copy")),
    row("delay of the next step's end by a save", "`save_state`", "-", "-", CHECKPOINTS, delay("save_state")),
    row("delay of the next step's end by a save", "plain copy of the bytes", "-", "-", CHECKPOINTS, delay("copy")),
    row(f"peak memory per process, {CLASSES}, fp32", "Trainer as shipped", "≤ 1.0", "≤ 0.7", FP32, memory),
)


def row_of(comparison: Comparison) -> str:
    """The comparison as a row: what was measured and where, or that it was not."""
    try:
        report = json.loads((RESULTS / comparison.file).read_text())
        ours, theirs, ratio = comparison.measured(report)
        at = report["machine"]
        machine = f"[{at['cpu']}, {at['cores_used']} of {at['cores']} cores](../benchmarks/results/{comparison.file})"
    except (FileNotFoundError, KeyError):
        ours, theirs, ratio, machine = "not measured", "", "-", "-"
    peer = ": ".join(filter(None, (comparison.peer, theirs))) or "-"
    return f"| {' | '.join([comparison.name, ours, peer, ratio, comparison.minimum, comparison.target, machine])} |"


def commands() -> str:
    """The commands that measured the files, or would, as a block of code: one for each file."""
    found = {}
    for comparison in COMPARISONS:
        path = RESULTS / comparison.file
        found[comparison.file] = (
            json.loads(path.read_text()).get("command", comparison.command) if path.exists() else comparison.command
        )
    return "\n".join(["```", *found.values(), "```"])


def table() -> str:
    """All comparisons as Markdown, and the commands below."""
    head = [
        "| benchmark | ours | peer | ratio: median (95 % interval or range) | minimum | target | machine, file |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(row_of, COMPARISONS), "", commands()])


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} lacks the line {START} or the line {END}"
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")
    print(table())


if __name__ == "__main__":
    main()
