"""Finds the first difference of two runs, or lists the results of any number of runs.

`python -m shared.compare RUN_A RUN_B` compares two run folders: samples, learning rate and loss at each logged step,
all tensors of the checkpoints at each step of which both runs have one, and the exported model. What only one run has
is a difference. The exit code is 0 if the runs are the same, 1 if they differ, 2 if they cannot be compared.

Training amplifies rounding, so the tolerance grows with the steps (`allowed`), and a jump is a difference at any step.

`python -m shared.compare RUN RUN RUN ...` prints a table of results. Runs that differ only in --seed share a row, with
the mean and the standard deviation of their results. `--table` prints the table for two runs as well.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.checkpoints.progress import BestBy
from shared.checkpoints.resuming import checkpoints_of
from shared.config.options import NOT_IN_RESULT, load, shown
from shared.errors import UserError, about
from shared.fsdp.strategy import is_sharded
from shared.monitoring.evaluation import greater_is_better
from shared.monitoring.log import read_metrics

Lines = Sequence[Mapping[str, Any]]
Tensors = Mapping[str, Path]  # the name of each tensor, and its file
EARLY = 20  # steps
# Relative differences that rounding explains: at any step, and after `EARLY` steps, from where on they grow.
EQUAL, LOSS, WEIGHTS, OPTIMIZER = (0.0, 0.0), (1e-4, 1e-5), (1e-5, 1e-5), (1e-4, 1e-4)
TINY = 1e-150  # the difference of zeros with different signs, which are not the same bytes
JUMP = 100  # rounding grew at most 13-fold from one reading to the next, over 2,000 steps at learning rate 1e-3


@dataclass(frozen=True)
class Quantity:
    """A row of the table: what is compared, with its relative difference and what it consists of, at each step."""

    name: str
    at: Mapping[int, tuple[float, str]]
    rounding: tuple[float, float] = EQUAL

    def differs_at(self) -> int | None:
        """The first step whose difference rounding does not explain."""
        before = math.inf  # the first of them may be any step
        for step, (difference, _) in self.at.items():
            if difference > allowed(step, self.rounding, before):
                return step
            before = difference if before == math.inf else max(before, difference)
        return None

    def row(self) -> list[str]:
        """The name, the compared steps, the largest difference, and where the runs differ."""
        if not self.at:
            return [self.name, "not compared", "", ""]
        steps, first = [*self.at], self.differs_at()
        largest, where = max((difference, step) for step, (difference, _) in self.at.items())
        span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        difference = f"{largest:.1e} at step {where}" if largest else "equal"
        return [self.name, span, difference, "-" if first is None else f"step {first}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the runs of the command line, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shared.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+", help="output folder of a run")
    parser.add_argument("--table", action="store_true", help="print a table of results, also for two runs")
    given = parser.parse_args(arguments)
    try:
        return print_results(given.runs) if given.table or len(given.runs) != 2 else compare_runs(*given.runs)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare_runs(a: Path, b: Path) -> int:
    """Compare two runs, print the result, and return the exit code.

    Raises:
        UserError: the runs cannot be compared.
        FileNotFoundError: a folder has no metrics.jsonl or no config.yaml.
    """
    lines_a, lines_b = ([line for line in read_metrics(run / "metrics.jsonl") if "loss" in line] for run in (a, b))
    quantities = [
        compare_values(lines_a, lines_b, "samples", EQUAL),
        compare_values(lines_a, lines_b, "learning_rate", EQUAL),
        compare_values(lines_a, lines_b, "loss", LOSS),
        *compare_checkpoints(a, b),
    ]
    if not any(quantity.at for quantity in quantities):
        raise UserError(f"{a} and {b}: nothing was logged or saved at the same steps; use the same --logging_steps")
    quantities += compare_ends(a, b)
    for name, run, lines in (("A", a, lines_a), ("B", b, lines_b)):
        processes = [number for number, _ in groupby(str(line.get("processes", "unknown")) for line in lines)]
        print(f"{name}  {run}: processes {', then '.join(processes)}")
    of_a, of_b = settings_of((a, b))
    changed = [f"{name} {of_a.get(name, 'absent')} | {of_b.get(name, 'absent')}" for name in differing((of_a, of_b))]
    print(f"settings that differ, A | B: {', '.join(changed) or 'none'}")
    print_table([["", "compared", "largest difference", "differs at"], *(quantity.row() for quantity in quantities)])
    found = [(step, quantity) for quantity in quantities if (step := quantity.differs_at()) is not None]
    if found:
        step, first = min(found, key=lambda each: each[0])  # of several at this step, the first is the cause
        print(f"the runs first differ at step {step} in {first.name}: {first.at[step][1]}")
        return 1
    print(f"the same run: {', '.join(quantity.name for quantity in quantities if quantity.at)}")
    return 0


def allowed(step: int, rounding: tuple[float, float], before: float) -> float:
    """The largest relative difference that rounding explains after `step` steps: it grows with the square of the steps.

    `before` is the largest difference at the steps compared earlier: rounding does not jump.
    """
    always, early = rounding
    return max(always, min(early * (step / EARLY) ** 2, JUMP * before))


def settings_of(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """The settings of each run, without those that affect the result of none.

    Raises:
        FileNotFoundError: a folder has no config.yaml.
    """
    files = [run / "config.yaml" for run in runs]
    ignored = not_in_result(*files)
    return [{name: value for name, value in load(file).items() if name not in ignored} for file in files]


def not_in_result(*paths: Path) -> set[str]:
    """The names of the settings that do not affect the result of any of the runs with these config.yaml.

    The first line of a file says it, because the recipe of a run may be unknown here; `load` refuses other files.
    """
    lines = (path.read_text(encoding="utf-8", errors="replace").partition("\n")[0] for path in paths)
    return {name for line in lines for name in line.removeprefix(NOT_IN_RESULT).split()}


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not equal in all runs."""
    names = dict.fromkeys(name for settings in every for name in settings)
    return [name for name in names if any(settings.get(name) != every[0].get(name) for settings in every)]


def compare_values(lines_a: Lines, lines_b: Lines, key: str, rounding: tuple[float, float]) -> Quantity:
    """Compare one number, or one text, of the training lines.

    A logged loss is the mean since the previous line, so two losses are compared only if both lines have the same step
    and their previous lines do, too.
    """
    a, b = (
        {
            (line["step"], before["step"] if key == "loss" else None): line[key]
            for before, line in zip([{"step": 0}, *lines], lines, strict=False)
            if key in line
        }
        for lines in (lines_a, lines_b)
    )
    both = [where for where in a if where in b]
    at = {where[0]: (relative(a[where], b[where]), f"{a[where]} against {b[where]}") for where in both}
    return Quantity(key.replace("_", " "), at, rounding)


def relative(a: float | str, b: float | str) -> float:
    """The difference of two numbers relative to the greater one; NaN equals NaN and is infinitely far from numbers.

    Different texts are infinitely far from each other.
    """
    if a == b or (a != a and b != b):  # noqa: PLR0124  # NaN
        return 0.0
    if isinstance(a, str) or isinstance(b, str) or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare_ends(run_a: Path, run_b: Path) -> list[Quantity]:
    """Compare the last steps of the runs, whether they are finished, and at the same step the weights in model/."""
    last = [(read_metrics(run / "metrics.jsonl") or [{"step": 0}])[-1] for run in (run_a, run_b)]
    a, b = (f"step {line['step']}, {'' if 'train_runtime' in line else 'not '}finished" for line in last)
    first, second = sorted(int(line["step"]) for line in last)
    end = Quantity("end", {first + (first < second): (relative(a, b), f"A ends at {a}; B at {b}")})
    models = {first: (run_a / "model", run_b / "model")} if first == second else {}
    return [end, *compare_tensors("model", models)]


def compare_checkpoints(run_a: Path, run_b: Path) -> list[Quantity]:
    """Compare all tensors of the checkpoints that both runs have, and of the newest one, which both must have.

    Older ones may have been removed, or saved by an interruption. A run without any checkpoint has none to compare. The
    tensors of a sharded one (FSDP2) are in files of another kind, which are not compared.
    """
    a, b = checkpoints_of(run_a), checkpoints_of(run_b)
    steps = sorted({*(a.keys() & b.keys()), max([*a, *b])}) if a and b else []
    pairs = {step: (a.get(step), b.get(step)) for step in steps}
    whole = {step: both for step, both in pairs.items() if not any(path and is_sharded(path) for path in both)}
    return compare_tensors("checkpoints", whole)


def compare_tensors(name: str, folders: Mapping[int, tuple[Path | None, Path | None]]) -> list[Quantity]:
    """Compare two folders for each step: a quantity for each kind of file, such as model or optimizer."""
    differences: dict[str, dict[int, tuple[float, str]]] = {}
    for step, (a, b) in folders.items():
        parts_a, parts_b = tensors_of(a), tensors_of(b)
        for part in sorted({*parts_a, *parts_b}):
            differences.setdefault(part, {})[step] = difference_of(parts_a.get(part, {}), parts_b.get(part, {}))
    return [
        Quantity(name if part == name else f"{name}: {part}", at, OPTIMIZER if part == "optimizer" else WEIGHTS)
        for part, at in differences.items()
    ] or [Quantity(name, {})]


def tensors_of(folder: Path | None) -> dict[str, dict[str, Path]]:
    """The tensors of a checkpoint or an exported model, if there is one: {file, without its number: {tensor: file}}.

    A model may consist of several files, numbered as model-00001-of-00002.safetensors.
    """
    parts: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        with about(str(file)), safe_open(file, framework="pt") as opened:
            parts.setdefault(re.sub(r"-\d+(-of-\d+)?$", "", file.stem), {}).update(dict.fromkeys(opened.keys(), file))
    return parts


def difference_of(tensors_a: Tensors, tensors_b: Tensors) -> tuple[float, str]:
    """Compare two sets of tensors, with one tensor of each in memory at a time.

    Returns the norm of the difference divided by the norm of the values, all tensors as one vector, and a description
    with the tensor that differs most. The moments of an optimizer have different scales: each kind is a vector of its
    own, and the largest difference counts. The difference is infinite if names, shapes or types differ or a value is
    not finite.
    """
    if odd := sorted(tensors_a.keys() ^ tensors_b.keys()):
        return math.inf, f"only {'A' if odd[0] in tensors_a else 'B'} has {odd[0]}"
    squares: dict[str, list[float]] = {}  # of each vector: of the difference, of the values
    worst = (0.0, "no tensor")
    for name in sorted(tensors_a):
        with safe_open(tensors_a[name], framework="pt") as file_a, safe_open(tensors_b[name], framework="pt") as file_b:
            a, b = file_a.get_tensor(name), file_b.get_tensor(name)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return math.inf, f"{name} has shape {list(a.shape)} of {a.dtype} against {list(b.shape)} of {b.dtype}"
        same = torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))
        if not a.is_floating_point():
            if not same:  # rounding does not change a counter or an index, and its size would mask the weights
                return math.inf, f"{name} differs"
            continue
        norm = max(a.double().norm().item(), b.double().norm().item())
        difference = 0.0 if same else max((a.double() - b.double()).norm().item(), TINY)
        vector = squares.setdefault(name.partition("/")[2], [0.0, 0.0])  # the moment, in a file of an optimizer
        vector[0] += difference**2
        vector[1] += norm**2
        worst = max(worst, (difference / (norm or 1.0), name))
    ratios = [math.sqrt(difference / (norm or 1.0)) for difference, norm in squares.values()]
    if not all(map(math.isfinite, ratios)):
        return math.inf, "values that are not finite"
    return max(ratios, default=0.0), f"off by {max(ratios, default=0.0):.1e} ({worst[0]:.1e} in {worst[1]})"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


# The table of results


def print_results(runs: Sequence[Path]) -> int:
    """Print a row for each group of runs that differ only in their seed; return the exit code 0.

    Raises:
        UserError: two runs have equal settings and seeds; or see `settings_of` and `result_of`.
    """
    every = settings_of(runs)
    names = [name for name in differing(every) if name != "seed"]
    groups: dict[str, tuple[list[Any], dict[Any, dict[str, float]]]] = {}  # values of `names`, and results by seed
    for run, settings in zip(runs, every, strict=True):
        values = [settings.get(name) for name in names]
        _, results = groups.setdefault(repr(values), (values, {}))
        if settings["seed"] in results:
            raise UserError(f"{run} and another run have the same settings and the same seed; give one of them")
        results[settings["seed"]] = result_of(run, settings)
    found = [result for _, results in groups.values() for result in results.values()]
    scores = [*dict.fromkeys(name for result in found for name in result)]
    table = [[*names, "runs", "seeds", *scores]]
    for values, results in groups.values():
        spreads = (mean_and_spread([result[name] for result in results.values() if name in result]) for name in scores)
        table.append([*map(shown, values), str(len(results)), " ".join(map(str, results)), *spreads])
    print_table(table)
    print("mean ± standard deviation over the seeds, of the evaluation of the exported model")
    return 0


def result_of(run: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """The evaluation of the model that a run exports: the last one, or the best with --load_best_model_at_end.

    Raises:
        UserError: the run has not been evaluated, or is not finished.
    """
    lines = read_metrics(run / "metrics.jsonl")
    evaluations: list[Any] = [line for line in lines if "eval_loss" in line]
    if not evaluations or "train_runtime" not in lines[-1]:
        raise UserError(f"{run}: the run is not finished; start it again to resume, or leave it out")
    chosen = evaluations[-1]
    if settings.get("load_best_model_at_end"):
        name = str(settings["metric_for_best_model"]).removeprefix("eval_")
        best_by = BestBy(f"eval_{name}", greater_is_better(name, settings.get("greater_is_better")))
        chosen = reduce(lambda best, line: line if best_by.improves(line, best) else best, evaluations)
    return {name: float(value) for name, value in chosen.items() if name.startswith("eval_")}


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; one value alone has no deviation."""
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    of_all = torch.tensor(values, dtype=torch.float64)  # statistics.stdev cannot compute with NaN and infinities
    return f"{of_all.mean().item():.4g} ± {of_all.std().item():.2g}"


if __name__ == "__main__":
    sys.exit(main())
