"""Write the tables of `make bench` into docs/performance.md, from the JSON files in benchmarks/results.

    python benchmarks/results_table.py

What has no file, or whose file lacks the figure, reads "not measured". The commands that measured the files follow.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.launching import ROOT, between_marks

RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/performance.md"
START, END = "<!-- benchmarks/results_table.py writes these tables -->", "<!-- end of these tables -->"
WORKS = ("classification", "regression", "mlm", "tagging", "embeddings")


class Row(NamedTuple):
    """A row of the table of parts of a run."""

    name: str
    beside: str
    file: str
    path: tuple[str, ...]  # keys in the file, to a number or to the summary of several rounds
    format: str
    minimum: str
    target: str


LOOP = "CPU time of the loop per step, above a bare loop (µs)"
PAUSE, DELAY = "pause of the loop for a save", "delay of the next step's end by a save"
OURS, EQUAL = "ours - bare, thread_us", "rounds with weights equal to the bit"
STEPS, SAME, SAVES = "loop_cost.json", "bare_loop_same_batches.json", "checkpoints_cpu.json"
FOUND = "comparisons"
ROWS = (
    Row(LOOP, "", STEPS, (FOUND, OURS), "+.0f", "≤ +60", "≤ +10"),
    *(
        Row(f"the same, {name}", "", STEPS, (FOUND, f"{name.lower()} - bare, thread_us"), "+.0f", "", "")
        for name in ("Accelerate", "Fabric", "Trainer")
    ),
    Row(
        "speed on the same micro-batches", "bare DDP", SAME, (FOUND, "speed of ours / bare"), ".3f", "≥ 0.99", "≥ 0.998"
    ),
    Row("rounds of these with equal weights", "bare DDP", SAME, (FOUND, EQUAL), ".0%", "100 %", ""),
    *(
        Row(f"MFU, {about}, {way}", "matrix product", "utilisation.json", (FOUND, f"mfu, {size} {way}"), ".0%", *bars)
        for size, about in (("wide", "width 768"), ("small", "4 layers of width 256"))
        for way, bars in (("fp32", ("≥ 65 %", "≥ 85 %")), ("bf16", ("≥ 45 %", "≥ 70 %")))
    ),
    Row(PAUSE, "`accelerator.save_state`", SAVES, ("summary", "ours_against", "save_state"), ".2f", "≤ 0.20", ""),
    Row(PAUSE, "plain copy of the bytes", SAVES, ("summary", "ours_against", "copy"), ".2f", "", "≤ 1.15"),
    Row(DELAY, "`save_state`", SAVES, ("summary", "extra_of_ours_against", "save_state"), ".2f", "", ""),
    Row(DELAY, "plain copy of the bytes", SAVES, ("summary", "extra_of_ours_against", "copy"), ".2f", "", ""),
)


def report_of(file: str) -> dict[str, Any]:
    """The content of a file of results; {} if it does not exist."""
    path = RESULTS / file
    return json.loads(path.read_text()) if path.exists() else {}


def link(file: str, report: dict[str, Any]) -> str:
    """The machine, linked to the file."""
    at = report["machine"]
    return f"[{at['cpu']}, {at['cores_used']} of {at['cores']} cores](../benchmarks/results/{file})"


def line_of(row: Row) -> str:
    """A row as Markdown: `1.02 (1.01 to 1.06)` is a median and its interval or range."""
    report = found = report_of(row.file)
    for key in row.path:
        found = found.get(key, {})
    if found == {}:
        shown = "not measured"
    elif isinstance(found, dict):
        low, high = found.get("low", found.get("min")), found.get("high", found.get("max"))
        shown = f"{found['median']:{row.format}} ({low:{row.format}} to {high:{row.format}})"
    else:
        shown = format(found, row.format)
    where = link(row.file, report) if report else "-"
    return f"| {' | '.join([row.name, row.beside or '-', shown, row.minimum or '-', row.target or '-', where])} |"


def lines_of(work: str) -> list[str]:
    """The contestants of a kind of work as Markdown; a figure is the median of the rounds."""
    file = f"real_{work}.json"
    if not (report := report_of(file)):
        return [f"| {work} | not measured | - | - | - | - | - |"]
    rows = report["rows"]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    number = len(rows) // len(names)

    def median(name: str, figure: str) -> float:
        return statistics.median(row[figure] for row in rows if row["contestant"] == name)

    first, lines = median(names[0], "processor_seconds"), []
    for name in names:
        seconds, score, memory = (median(name, key) for key in ("processor_seconds", "score", "peak_rss_mib"))
        figures = f"{seconds:.0f} s | {seconds / first:.2f} | {score:.3f} | {memory:,.0f} MiB"
        rounds = f"{number} round{'s' * (number > 1)}"
        lines.append(f"| {work} | `{name}` | {figures} | {rounds}, {link(file, report)} |")
    return lines


def tables() -> str:
    """Both tables as Markdown, and the commands below."""
    files = [*(f"real_{work}.json" for work in WORKS), *dict.fromkeys(row.file for row in ROWS)]
    return "\n".join(
        [
            "| work | contestant | processor time | over the recipe's | score | peak memory | measured |",
            "|---|---|---:|---:|---:|---:|---|",
            *(line for work in WORKS for line in lines_of(work)),
            "",
            "| part of a run | beside | median (95 % interval or range) | minimum | target | machine, file |",
            "|---|---|---|---|---|---|",
            *map(line_of, ROWS),
            "",
            "```",
            *(command for file in files if (command := report_of(file).get("command"))),
            "```",
        ]
    )


def main() -> None:
    PAGE.write_text(between_marks(PAGE.read_text(), START, END, tables()))
    print(tables())


if __name__ == "__main__":
    main()
