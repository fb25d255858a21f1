"""Finds the first difference of two runs, or lists the results of any number of runs.

`python -m shared.compare RUN_A RUN_B` compares two run folders: samples, learning rate and loss at each logged step,
and weights at the end and at each step of which both runs have a checkpoint. The exit code is 0 if the runs are the
same, 1 if they differ, 2 if they cannot be compared.

`python -m shared.compare RUN RUN RUN ...` prints a table of results. Runs that differ only in --seed share a row, with
the mean and the standard deviation of their results. `--table` prints the table for two runs as well.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoints.resuming import complete
from shared.config.options import Options, load, shown
from shared.errors import UserError
from shared.monitoring.evaluation import greater_is_better
from shared.monitoring.tracking import read_metrics

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A row of the table: a quantity of both runs, at the steps `compared`.

    `difference` describes the largest difference. `differs_at` is the first step at which the difference exceeds its
    tolerance, and `words` describes the difference at that step.
    """

    what: str
    compared: str
    difference: str = ""
    differs_at: int | None = None
    words: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the runs of the command line, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shared.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+", help="output folder of a run")
    parser.add_argument("--table", action="store_true", help="print a table of results, also for two runs")
    parser.add_argument("--loss_tolerance", type=float, default=1e-4, help="relative, of losses (default: %(default)s)")
    parser.add_argument(
        "--weight_tolerance",
        type=float,
        default=1e-5,
        help="relative, of all weights as one vector (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    if given.table or len(given.runs) != 2:
        for name in ("loss_tolerance", "weight_tolerance"):
            if getattr(given, name) != parser.get_default(name):
                parser.error(f"--{name} has no effect on a table of results: leave it out")
        return print_results(given.runs)
    a, b = given.runs
    try:
        lines_a, lines_b = training_lines(a), training_lines(b)
        findings = [
            compare_samples(lines_a, lines_b),
            compare_numbers(lines_a, lines_b, "learning_rate", tolerance=0),
            compare_numbers(lines_a, lines_b, "loss", tolerance=given.loss_tolerance),
            compare_checkpoints(a, b, given.weight_tolerance),
            compare_models(a, b, lines_a[-1]["step"], lines_b[-1]["step"], given.weight_tolerance),
        ]
        if not any(finding.difference for finding in findings):
            raise UserError(f"{a} and {b}: nothing was logged or saved at the same steps; use the same --logging_steps")
        for name, run, lines in (("A", a, lines_a), ("B", b, lines_b)):
            print(f"{name}  {run}: logged {span([line['step'] for line in lines])}")
        print(f"settings that differ, A | B: {', '.join(differing_settings(a, b)) or 'none'}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(findings)
    print(verdict(findings))
    return 0 if all(finding.differs_at is None for finding in findings) else 1


def training_lines(run: Path) -> Lines:
    """The training lines of a run's metrics.jsonl.

    Raises:
        UserError: the folder has no metrics.jsonl, or the run has logged no step.
    """
    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run}: the folder has no metrics.jsonl; give the --output_dir of a run")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    if not lines:
        raise UserError(f"{run}: metrics.jsonl has no training step yet; let the run log a step first")
    return lines


def differing_settings(a: Path, b: Path) -> list[str]:
    """The settings that can affect the result and differ between the two config.yaml, as "seed 1 | 2"."""
    if not ((a / "config.yaml").is_file() and (b / "config.yaml").is_file()):
        return []
    settings_a, settings_b = load(a / "config.yaml"), load(b / "config.yaml")
    return [
        f"{name} {settings_a.get(name, 'absent')} | {settings_b.get(name, 'absent')}"
        for name in {**settings_a, **settings_b}
        if name not in Options.NEVER_MATTERS and settings_a.get(name) != settings_b.get(name)
    ]


def compare_samples(lines_a: Lines, lines_b: Lines) -> Finding:
    """Compare the running digests of the samples that went through the models."""
    a, b = ({line["step"]: line["samples"] for line in lines if "samples" in line} for lines in (lines_a, lines_b))
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return Finding("samples", "not compared: not logged at the same steps")
    different = [step for step in steps if a[step] != b[step]]
    if not different:
        return Finding("samples", span(steps), "equal")
    first = different[0]
    return Finding("samples", span(steps), f"at {len(different)} steps", first, f"{a[first]} against {b[first]}")


def compare_numbers(lines_a: Lines, lines_b: Lines, key: str, tolerance: float) -> Finding:
    """Compare one number of the training lines, relative to the greater value.

    A logged loss is the mean since the previous line, so two losses are compared only if both lines have the same step
    and their previous lines do, too.
    """
    a, b = (
        {
            (before["step"] if key == "loss" else None, line["step"]): line[key]
            for before, line in zip([{"step": 0}, *lines], lines, strict=False)
            if key in line
        }
        for lines in (lines_a, lines_b)
    )
    both = sorted(a.keys() & b.keys(), key=lambda where: where[1])
    what = key.replace("_", " ")
    if not both:
        return Finding(what, "not compared: not logged at the same steps")
    differences = {where: relative(a[where], b[where]) for where in both}
    worst = max(both, key=lambda where: differences[where])
    largest = f"off by {differences[worst]:.1e} at step {worst[1]}" if differences[worst] else "equal"
    compared = span([step for _, step in both])
    for where in both:
        if differences[where] > tolerance:
            return Finding(what, compared, largest, where[1], against(a[where], b[where]))
    return Finding(what, compared, largest)


def against(a: float, b: float) -> str:
    """Two numbers, with all digits if six do not show the difference."""
    short = f"{a:.6g}", f"{b:.6g}"
    return " against ".join(short if short[0] != short[1] else (repr(a), repr(b)))


def relative(a: float, b: float) -> float:
    """The difference of two numbers relative to the greater one; NaN equals NaN and is infinitely far from numbers."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def compare_checkpoints(run_a: Path, run_b: Path, tolerance: float) -> Finding:
    """Compare the weights at each step of which both runs have a checkpoint."""
    a, b = complete(run_a), complete(run_b)
    steps = [step for step in sorted(a.keys() & b.keys()) if tensors(a[step]) and tensors(b[step])]
    if not steps:
        return Finding("checkpoints", "not compared: no *.safetensors of the same step in both")
    differences = {step: weight_difference(a[step], b[step]) for step in steps}
    worst = max(steps, key=lambda step: differences[step][0])
    largest = differences[worst][1] + (f" at step {worst}" if differences[worst][0] and len(steps) > 1 else "")
    for step in steps:
        if differences[step][0] > tolerance:
            return Finding("checkpoints", span(steps), largest, step, differences[step][1])
    return Finding("checkpoints", span(steps), largest)


def compare_models(run_a: Path, run_b: Path, last_a: int, last_b: int, tolerance: float) -> Finding:
    """Compare the weights in model/ of two runs that ended at the same step."""
    a, b = run_a / "model", run_b / "model"
    if not (tensors(a) and tensors(b)):
        return Finding("model", "not compared: no model/*.safetensors in both")
    if last_a != last_b:
        return Finding("model", f"not compared: the runs end at steps {last_a} and {last_b}")
    difference, words = weight_difference(a, b)
    return Finding("model", "at the end", words, last_a if difference > tolerance else None, words)


def weight_difference(folder_a: Path, folder_b: Path) -> tuple[float, str]:
    """Compare two saved models, with one tensor of each in memory at a time.

    Returns the norm of the difference divided by the norm of the weights, all tensors as one vector, and a description
    with the tensor that differs most. The difference is infinite if names or shapes differ or a value is not finite.
    """
    import torch
    from safetensors import safe_open

    files_a, files_b = tensors(folder_a), tensors(folder_b)
    if odd := files_a.keys() ^ files_b.keys():
        return math.inf, f"only one has {min(odd)}"
    squared_difference = squared_norm = 0.0
    differing = {}  # name: relative difference, of the tensors that are not the same byte for byte
    for name in sorted(files_a):
        with safe_open(files_a[name], framework="pt") as file_a, safe_open(files_b[name], framework="pt") as file_b:
            a, b = file_a.get_tensor(name), file_b.get_tensor(name)
        if a.shape != b.shape:
            return math.inf, f"{name} has shape {list(a.shape)} against {list(b.shape)}"
        same = a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        if not (a.is_floating_point() and b.is_floating_point()):
            if not same:  # rounding does not change a counter or an index, and its size would mask the weights
                return math.inf, f"{name} differs"
            continue
        norm = max(a.double().norm().item(), b.double().norm().item())
        squared_norm += norm**2
        if not same:
            difference = (a.double() - b.double()).norm().item()
            squared_difference += difference**2
            differing[name] = difference / norm if norm else 0.0  # no norm: zeros that differ in sign or dtype
    if not differing:
        return 0.0, "byte for byte"
    total = math.sqrt(squared_difference / squared_norm) if squared_norm else 0.0
    if not math.isfinite(total):
        return math.inf, "values that are not finite"
    worst = max(differing, key=lambda name: differing[name])
    return total, f"off by {total:.1e} ({differing[worst]:.1e} in {worst})"


def tensors(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a saved model, which may consist of several files: {name of the tensor: file}."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def span(steps: Sequence[int]) -> str:
    """A short description of a list of steps."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def print_table(findings: Sequence[Finding]) -> None:
    """One aligned row for each finding."""
    rows = [("", "compared", "relative difference", "differs at")]
    for finding in findings:
        where = "" if not finding.difference else "-" if finding.differs_at is None else f"step {finding.differs_at}"
        rows.append((finding.what, finding.compared, finding.difference, where))
    widths = [max(len(row[column]) for row in rows if row[2] or not column) for column in range(3)]
    for what, compared, difference, where in rows:
        print(f"{what:<{widths[0]}}  {compared:<{widths[1]}}  {difference:<{widths[2]}}  {where}".rstrip())


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence. It names the first finding at the first step with a difference: causes come before consequences."""
    steps = [finding.differs_at for finding in findings if finding.differs_at is not None]
    if steps:
        first = next(finding for finding in findings if finding.differs_at == min(steps))
        return f"the runs first differ at step {first.differs_at} in {first.what}: {first.words}"
    compared = [finding for finding in findings if finding.difference]
    return f"the same run: {compared[0].compared} ({', '.join(f'{it.what} {it.difference}' for it in compared)})"


# The table of results


def print_results(runs: Sequence[Path]) -> int:
    """Print a row for each group of runs that differ only in their seed; return the exit code, 0 or 2."""
    try:
        groups = groups_of(runs)
        results = [[result_of(run, settings) for run, settings in group] for group in groups]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    first = [group[0][1] for group in groups]
    names = {name: None for settings in first for name in decisive(settings)}
    differing = [name for name in names if any(each.get(name) != first[0].get(name) for each in first)]
    scores = list({name: None for group in results for result in group for name in result})
    table = [[*differing, "runs", "seeds", *scores]]
    for group, found, settings in zip(groups, results, first, strict=True):
        seeds = " ".join(str(each["seed"]) for _, each in group)
        row = [shown(settings.get(name)) for name in differing] + [str(len(group)), seeds]
        table.append(row + [mean_and_spread([result[name] for result in found if name in result]) for name in scores])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print("mean ± standard deviation over the seeds, of the evaluation of the exported model")
    return 0


def groups_of(runs: Sequence[Path]) -> list[list[tuple[Path, dict[str, Any]]]]:
    """The runs with their settings, in groups that differ only in their seed; in the order of the command line.

    Raises:
        UserError: a folder has no config.yaml, or two runs of a group have the same seed.
    """
    groups: list[list[tuple[Path, dict[str, Any]]]] = []
    for run in runs:
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run}: the folder has no config.yaml; give the --output_dir of a run")
        settings = load(run / "config.yaml")
        group = next((each for each in groups if decisive(each[0][1]) == decisive(settings)), None)
        if group is None:
            groups.append(group := [])
        for other, others in group:
            if others["seed"] == settings["seed"]:
                raise UserError(f"{other} and {run} have the same settings and the same seed; give one of them")
        group.append((run, settings))
    return groups


def decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that affect the result, except the seed."""
    return {name: value for name, value in settings.items() if name not in Options.NEVER_MATTERS | {"seed"}}


def result_of(run: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """The evaluation of the model that a run exports: the last one, or the best with --load_best_model_at_end.

    Raises:
        UserError: the run has not been evaluated, or is not finished.
    """
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    evaluations = [line for line in lines if "eval_loss" in line]
    if not evaluations or "train_runtime" not in lines[-1]:
        raise UserError(f"{run}: the run is not finished; start it again to resume, or leave it out")
    chosen = evaluations[-1]
    if settings.get("load_best_model_at_end"):
        name = str(settings["metric_for_best_model"]).removeprefix("eval_")
        greater = settings.get("greater_is_better")
        best = max if (greater_is_better(name) if greater is None else greater) else min
        chosen = best(evaluations, key=lambda line: line[f"eval_{name}"])
    return {name: float(value) for name, value in chosen.items() if name.startswith("eval_")}


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; one value alone has no deviation."""
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values):.2g}"


if __name__ == "__main__":
    sys.exit(main())
