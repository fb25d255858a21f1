"""Measure when a held-out score is reached: optimizers and schedules beside each other, in steps and CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/time_to_quality.py --output_dir out/time_to_quality

The file --tasks lists recipes, targets and contestants. Each contestant first runs with each learning rate of its grid
and a seed of its own, TUNING. With the best rate it then runs once per seed; contestants take turns. All runs are made
in this process, one after the other. CPU seconds are those of the training steps on all threads, without the start and
without evaluations and checkpoints. Writes time_to_quality.json, with every run and its curve, and time_to_quality.md
into the output folder. Started again, it does the runs that the JSON file lacks.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import scipy.stats
import yaml

from benchmarks.harness import launching, rounds
from shared.config import options
from shared.monitoring.hooks import Hook

TUNING = 1000  # the seed of the runs that choose a learning rate
Run = dict[str, Any]


class Clock(Hook):
    """The CPU seconds of this process in training steps, and the score of each evaluation."""

    def __init__(self, score: str) -> None:
        self.score, self.seconds = score, 0.0
        self.curve: list[tuple[int, float, float]] = []  # step, seconds until then, score

    def begun(self, run: Any) -> None:
        """Start."""
        self.read = time.process_time()

    def passed(self, part: str) -> None:
        """Add the seconds of a part of a step."""
        before, self.read = self.read, time.process_time()
        if part not in ("evaluation", "checkpoint"):
            self.seconds += self.read - before

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Note an evaluation."""
        if self.score in values:
            self.curve.append((step, self.seconds, values[self.score]))


def run(task: Mapping[str, Any], contestant: str, rate: float, seed: int, folder: Path) -> Run:
    """Run a recipe in this process; its curve, and the step and seconds at which it reached the target (or None)."""
    recipe, clock = import_module(f"recipes.{task['recipe']}"), Clock(task["score"])
    words = [*task["flags"].split(), *task["contestants"][contestant]["flags"].split(), "--checkpointing_steps", "no"]
    words += launching.flag_words({"learning_rate": rate, "seed": seed, "output_dir": folder})

    class Timed(recipe.Config):  # type: ignore[name-defined]
        def hooks(self) -> list[Hook]:
            return [*super().hooks(), clock]

    shutil.rmtree(folder, ignore_errors=True)  # of a start that was interrupted
    recipe.main(options.parse(Timed, words))
    shutil.rmtree(folder)
    return reached(task, clock.curve) | {"learning_rate": rate, "seed": seed, "curve": clock.curve}


def reached(task: Mapping[str, Any], curve: Sequence[tuple[int, float, float]]) -> Run:
    """The first evaluation of a curve that reaches the target, and the last score."""
    sign = {"lower": -1, "higher": 1}[task["better"]]
    step, seconds = next(
        ((step, seconds) for step, seconds, score in curve if sign * score >= sign * task["target"]), (None, None)
    )
    return {"steps": step, "cpu_seconds": seconds, "final": curve[-1][2]}


def best_rate(task: Mapping[str, Any], grid: Sequence[Run]) -> float:
    """The learning rate that reaches the target in the fewest steps; among equal ones, with the best last score."""
    sign = {"lower": 1, "higher": -1}[task["better"]]
    return min(grid, key=lambda run: (run["steps"] or np.inf, sign * run["final"]))["learning_rate"]


# The runs


def measure(name: str, task: Mapping[str, Any], seeds: int, report: dict[str, Any], folder: Path) -> None:
    """Add the runs of a task that a report lacks to it, and write it after each run."""

    def once(contestant: str, rate: float, seed: int) -> Run:
        for found in runs_of(report, name, contestant):
            if (found["learning_rate"], found["seed"]) == (rate, seed):
                return found
        made = {"task": name, "contestant": contestant} | run(task, contestant, rate, seed, folder / "run")
        report["runs"].append(made)
        write(report, folder)
        return made

    rates = {}
    for contestant, about in task["contestants"].items():
        grid = [once(contestant, float(rate), TUNING) for rate in about["learning_rates"]]
        rates[contestant] = best_rate(task, grid)
    rounds.take_turns(list(rates), seeds, lambda contestant, seed: once(contestant, rates[contestant], seed))


def runs_of(report: Mapping[str, Any], task: str, contestant: str) -> list[Run]:
    """The runs of a contestant, also those with the seed for tuning."""
    return [each for each in report["runs"] if (each["task"], each["contestant"]) == (task, contestant)]


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write the report as JSON and as tables."""
    (folder / "time_to_quality.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "time_to_quality.md").write_text(tables(report))


# The tables


def tables(report: Mapping[str, Any]) -> str:
    """The report as Markdown: per task the comparison, then the grids."""
    at = report["machine"]
    lines = [
        f"{at['cpu']}, {report['threads']} of {at['cores']} cores, torch {at['versions']['torch']}, {at['date'][:10]}."
    ]
    lines += [f"`{report['command']}`", ""]
    for name, task in report["tasks"].items():
        sign = {"lower": "at most", "higher": "at least"}[task["better"]]
        lines += [
            f"## {task['title']}: {task['score'].removeprefix('eval_')} {sign} {task['target']:g}",
            "",
            "| contestant | learning rate | reached | steps, each seed | CPU seconds, median | last score | steps / "
            f"{next(iter(task['contestants']))} | p | CPU seconds / the same | p |",
            f"|---|---:|---:|---|{'---:|' * 6}",
            *(line(report, name, contestant) for contestant in task["contestants"]),
            "",
            f"| learning rates, seed {TUNING} | steps and last score of each |",
            "|---|---|",
            *(grid_line(report, name, contestant) for contestant in task["contestants"]),
            "",
        ]
    lines += [
        "Ratios are geometric means over the seeds, and p is that of a paired t test of the logarithms, then of",
        "Wilcoxon's signed-rank test, whose smallest possible value is 2^(1 - seeds). Both are two-sided, and not",
        "corrected for several comparisons. A contestant that misses the target with a seed is not compared.",
        "",
    ]
    return "\n".join(lines)


def line(report: Mapping[str, Any], task: str, contestant: str) -> str:
    """The row of a contestant, with `-` for what its runs do not tell."""
    mine, first = (
        sorted((each for each in runs_of(report, task, name) if each["seed"] != TUNING), key=lambda each: each["seed"])
        for name in (contestant, next(iter(report["tasks"][task]["contestants"])))
    )
    if not mine:
        return f"| {contestant} | not run |{' - |' * 8}"
    seconds = [each["cpu_seconds"] for each in mine if each["steps"]]
    steps, finals = (", ".join(str(each["steps"] or "-") for each in mine), [each["final"] for each in mine])
    deviation = f" ± {statistics.stdev(finals):.3f}" if len(finals) > 1 else ""
    cells = [contestant, f"{mine[0]['learning_rate']:g}", f"{len(seconds)} of {len(mine)}", steps]
    cells += [f"{statistics.median(seconds):.1f}" if seconds else "-", f"{statistics.mean(finals):.3f}{deviation}"]
    pairs = list(zip(mine, first, strict=False))
    comparable = bool(first) and contestant != first[0]["contestant"]
    for figure in ("steps", "cpu_seconds"):
        cells += compared(pairs, figure) if comparable else ["-", "-"]
    return f"| {' | '.join(cells)} |"


def compared(pairs: Sequence[tuple[Run, Run]], figure: str) -> list[str]:
    """The geometric mean of the ratios of pairs of runs with one seed, and both p values; `-` if one is missing."""
    if any(each["seed"] != other["seed"] or not each[figure] or not other[figure] for each, other in pairs):
        return ["-", "-"]
    logs = np.log([each[figure] / other[figure] for each, other in pairs])
    if len(logs) < 2 or np.ptp(logs) == 0:  # a t test needs a deviation
        return [f"{np.exp(logs.mean()):.3f}", "-"]
    student, wilcoxon = scipy.stats.ttest_1samp(logs, 0.0).pvalue, scipy.stats.wilcoxon(logs).pvalue
    return [f"{np.exp(logs.mean()):.3f}", f"{student:.2g}, {wilcoxon:.2g}"]


def grid_line(report: Mapping[str, Any], task: str, contestant: str) -> str:
    """The grid of a contestant; the rate that it uses is bold, and a note says if this rate is at the edge."""
    grid = [each for each in runs_of(report, task, contestant) if each["seed"] == TUNING]
    rates = [float(rate) for rate in report["tasks"][task]["contestants"][contestant]["learning_rates"]]
    if len(grid) < len(rates):
        return f"| {contestant} | not run |"
    best = best_rate(report["tasks"][task], grid)
    cells = [f"{each['learning_rate']:g}: {each['steps'] or 'never'}, {each['final']:.3f}" for each in grid]
    marked = [f"**{cell}**" if each["learning_rate"] == best else cell for cell, each in zip(cells, grid, strict=True)]
    edge = " (at the edge of the grid)" if best in (min(rates), max(rates)) else ""
    return f"| {contestant} | {'; '.join(marked)}{edge} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, default=launching.ROOT / "benchmarks/time_to_quality.yaml")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output_dir", type=Path, default=Path("out/time_to_quality"))
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = yaml.safe_load(arguments.tasks.read_text())
    report = {"machine": rounds.machine(1), "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))}
    report |= {"command": rounds.command(), "tasks": tasks, "runs": []}
    if (file := folder / "time_to_quality.json").exists():
        report = json.loads(file.read_text())
        if report["tasks"] != tasks:
            parser.error(f"{file} has other tasks than {arguments.tasks}: give another --output_dir")
    for name, task in tasks.items():
        measure(name, task, arguments.seeds, report, folder)
    write(report, folder)
    print(tables(report))


if __name__ == "__main__":
    main()
