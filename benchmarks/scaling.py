"""Measure a recipe's speed on several numbers of processes, over links of several rates, in several variants.

    python benchmarks/scaling.py --processes 1 2 --recipe nlp --steps 12 --output_dir out/scaling
    python benchmarks/scaling.py --processes 2 --links 1000 100 --variants plain accumulate4 bf16_gradients ...

Strong scaling keeps the number of samples per step, weak scaling the number of samples per process. Each combination
runs --repeats times, in turns; the first part of each run is left out. Writes scaling.json and scaling.md into the
output folder.
"""

import argparse
import json
import shlex
import signal
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, limited_links, rounds
from benchmarks.harness.launching import ROOT, flag_words

RECIPES = {"nlp": "nlp.py", "image": "image_classification.py", "mlm": "mlm.py"}
VARIANTS: dict[str, tuple[int, list[str]]] = {  # factor of samples per step, flags
    "plain": (1, []),
    "accumulate4": (4, []),
    "accumulate16": (16, []),
    "bf16": (1, ["--mixed_precision", "bf16"]),
    "bf16_gradients": (1, ["--gradient_compression", "bf16"]),
    "fp16_gradients": (1, ["--gradient_compression", "fp16"]),
}
FIGURES = {  # name in a row: key in metrics.jsonl, whose mean it is
    "samples_per_second": "samples_per_second",
    "tokens_per_second": "tokens_per_second",
    "step_seconds": "step_seconds",
    "communication_share": "communication",
    "data_wait_share": "data_wait",
    "padding_share": "padding",
    "peak_memory_bytes": "peak_memory_bytes",
}


def window(steps: int) -> int:
    """Steps per line of metrics.jsonl: a third of the timed steps."""
    return max(1, steps // 3)


def train(
    arguments: argparse.Namespace, output: Path, processes: int, link_mbit: float, variant: str
) -> dict[str, float]:
    """Run the recipe once; the means of its figures after the first part."""
    times, flags = VARIANTS[variant]
    size = arguments.global_batch_size * times * (processes if arguments.weak else 1)
    every = window(arguments.steps)
    total = every + arguments.steps
    flags = [*flags, "--global_batch_size", size, "--max_train_steps", total, "--logging_steps", every]
    flags += ["--eval_steps", total, "--checkpointing_steps", "no", "--expect_processes", processes]
    flags += [*arguments.files, *shlex.split(arguments.flags), "--output_dir", output]
    command = [str(word) for word in (sys.executable, ROOT / "recipes" / RECIPES[arguments.recipe], *flags)]
    limited_links.run_group(command, processes, link_mbit, output.with_suffix(".log"), arguments.gpus)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_seconds" in line][1:]
    figures = {}
    for name, key in FIGURES.items():
        values = [line[key] for line in timed if key in line]
        if len(values) == len(timed):  # each covers equally many steps: rates need the harmonic mean
            figures[name] = (statistics.harmonic_mean if "per_second" in key else statistics.mean)(values)
    return figures


def summarize(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per combination: medians over its repeats, the extremes of its rate, and its efficiency.

    Efficiency is the rate per process, divided by that of the fewest processes with the same link and variant.
    """
    rows = []
    for key in dict.fromkeys((r["processes"], r["link_mbit"], r["variant"]) for r in found):
        mine = [r for r in found if (r["processes"], r["link_mbit"], r["variant"]) == key]
        row = dict(zip(("processes", "link_mbit", "variant"), key, strict=True)) | {"repeats": len(mine)}
        row |= {name: statistics.median(r[name] for r in mine) for name in FIGURES if name in mine[0]}
        for name in ("samples_per_second", "step_seconds"):
            row[f"{name}_spread"] = [min(r[name] for r in mine), max(r[name] for r in mine)]
        rows.append(row)
    for row in rows:
        same = [r for r in rows if (r["link_mbit"], r["variant"]) == (row["link_mbit"], row["variant"])]
        base = min(same, key=lambda r: r["processes"])
        rate = base["samples_per_second"] / base["processes"]
        row["scaling_efficiency"] = row["samples_per_second"] / row["processes"] / rate
    return rows


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The rows as Markdown, with the machine and the command."""
    at = about["machine"]
    lines = [
        f"{at['cpu']}, {at['cores']} cores, one thread per process, torch {at['versions']['torch']}, {at['date'][:10]}"
        f"; medians of {rows[0]['repeats']} (extremes). `{about['command']}`",
        "",
        "| processes | link | variant | samples/s | step (s) | efficiency | communication | data | padding | memory |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["samples_per_second_spread"]
        link = f"{row['link_mbit']:g} Mbit/s" if row["link_mbit"] else "memory" if row["processes"] > 1 else ""
        padding = f"{row['padding_share']:.1%}" if "padding_share" in row else ""
        rate = f"{row['samples_per_second']:,.1f} ({low:,.1f}-{high:,.1f})"
        lines.append(
            f"| {row['processes']} | {link} | {row['variant']} | {rate} | {row['step_seconds']:.3f} | "
            f"{row['scaling_efficiency']:.0%} | {row['communication_share']:.0%} | "
            f"{row['data_wait_share']:.1%} | {padding} | {row['peak_memory_bytes'] / 2**20:,.0f} MiB |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--recipe", choices=list(RECIPES), default="nlp")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run; a third as many come before")
    parser.add_argument("--weak", action="store_true", help="keep the samples per process, not per step")
    parser.add_argument("--global_batch_size", type=int, default=32, help="samples per step (weak: per process)")
    parser.add_argument("--links", type=float, nargs="+", default=[0], help="Mbit/s between processes; 0: no limit")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["plain"])
    parser.add_argument("--gpus", action="store_true", help="a GPU for each process; default: the CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags for the recipe, as one quoted word")
    parser.add_argument("--output_dir", type=Path, default=Path("out/scaling"))
    arguments = parser.parse_args()
    if arguments.steps % window(arguments.steps):  # otherwise the last line would cover fewer steps
        parser.error(f"--steps {arguments.steps}: give a multiple of 3")
    if any(arguments.links) and (reason := limited_links.why_not()):
        parser.error(f"--links {' '.join(f'{link:g}' for link in arguments.links)}: {reason}; use --links 0")
    folder = rounds.make_runs_folder(arguments.output_dir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception removes links and processes
    data = {} if arguments.recipe == "image" else encoder_and_texts.write_texts(folder)
    arguments.files = flag_words(data)
    combinations = {
        f"{variant}-{processes}-{link:g}": {"processes": processes, "link_mbit": link, "variant": variant}
        for processes, link, variant in product(arguments.processes, arguments.links, arguments.variants)
    }

    def run(name: str, repeat: int) -> rounds.Row:
        return combinations[name] | train(arguments, folder / f"{name}-{repeat}", **combinations[name])

    found = rounds.take_turns([*combinations], arguments.repeats, run)
    found.sort(key=lambda row: [*combinations].index(row["contestant"]))
    about = {"machine": rounds.machine(max(arguments.processes)), "command": rounds.command()}
    rows = [row | about for row in summarize(found)]
    (arguments.output_dir / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.output_dir / "scaling.md").write_text(table(rows, about))
    print(table(rows, about))


if __name__ == "__main__":
    main()
