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
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoints.resuming import complete
from shared.config.options import load, not_in_result, shown
from shared.errors import UserError, count_of
from shared.monitoring.evaluation import greater_is_better
from shared.monitoring.log import read_metrics
from shared.run.saved_tensors import difference_of, parts_of

Lines = Sequence[Mapping[str, Any]]
EARLY = 20  # steps
# Relative differences that rounding explains: at any step, and after `EARLY` steps, from where on they grow.
EQUAL, LOSS, WEIGHTS, OPTIMIZER = (0.0, 0.0), (1e-4, 1e-5), (1e-5, 1e-5), (1e-4, 1e-4)
JUMP = 100  # rounding grew at most 13-fold from one reading to the next, over 2,000 steps at learning rate 1e-3
BLURRED = 0.1  # with a larger tolerance, losses and weights tell little


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
    given = parser.parse_args(arguments)
    if given.table or len(given.runs) != 2:
        return print_results(given.runs)
    try:
        return compare(*given.runs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare(a: Path, b: Path) -> int:
    """Compare two runs, print the result, and return the exit code.

    Raises:
        UserError: the runs cannot be compared.
    """
    lines_a, lines_b = training_lines(a), training_lines(b)
    findings = [
        compare_samples(lines_a, lines_b),
        compare_numbers(lines_a, lines_b, "learning_rate", EQUAL),
        compare_numbers(lines_a, lines_b, "loss", LOSS),
        *compare_checkpoints(a, b),
        compare_ends(a, b),
        compare_models(a, b, lines_a[-1]["step"], lines_b[-1]["step"]),
    ]
    if not any(finding.difference and finding.compared for finding in findings[:-2]):
        raise UserError(f"{a} and {b}: nothing was logged or saved at the same steps; use the same --logging_steps")
    for name, run, lines in (("A", a, lines_a), ("B", b, lines_b)):
        print(f"{name}  {run}: logged {span([line['step'] for line in lines])}, on {processes_of(lines)}")
    numbers_a, numbers_b = ({line["step"]: line.get("processes") for line in lines} for lines in (lines_a, lines_b))
    if all(numbers_a[step] == numbers_b[step] is not None for step in numbers_a.keys() & numbers_b.keys()):
        print("on the same number of processes at every step: this comparison says nothing about other numbers")
    print(f"settings that differ, A | B: {', '.join(differing_settings(a, b)) or 'none'}")
    print_table(findings)
    if (last := min(lines_a[-1]["step"], lines_b[-1]["step"])) > (until := EARLY * math.sqrt(BLURRED / WEIGHTS[1])):
        print(f"after step {until:,.0f} of {last:,}, rounding may reach {BLURRED:.0%}: there, trust samples and jumps")
    print(verdict(findings))
    return 0 if all(finding.differs_at is None for finding in findings) else 1


def processes_of(lines: Lines) -> str:
    """The number of processes, and where the run was started again: `2 processes to step 40, 1 process to step 90`."""
    starts: list[tuple[str, int]] = []
    for line in lines:
        number = count_of(line["processes"], "process", "processes") if "processes" in line else "unknown processes"
        if starts and "timed_steps" not in line and starts[-1][0] == number:
            starts.pop()
        starts.append((number, line["step"]))
    return starts[0][0] if len(starts) == 1 else ", ".join(f"{number} to step {step}" for number, step in starts)


def allowed(step: int, rounding: tuple[float, float], before: float) -> float:
    """The largest relative difference that rounding explains after `step` steps: it grows with the square of the steps.

    `before` is the largest difference at the steps compared earlier: rounding does not jump.
    """
    always, early = rounding
    return max(always, min(early * (step / EARLY) ** 2, JUMP * before))


def first_beyond(differences: Mapping[int, float], rounding: tuple[float, float]) -> int | None:
    """The first step whose difference rounding does not explain."""
    before = math.inf  # the first of them may be any step
    for step, difference in differences.items():
        if difference > allowed(step, rounding, before):
            return step
        before = difference if before == math.inf else max(before, difference)
    return None


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
    ignored = not_in_result(a / "config.yaml", b / "config.yaml")
    return [
        f"{name} {settings_a.get(name, 'absent')} | {settings_b.get(name, 'absent')}"
        for name in {**settings_a, **settings_b}
        if name not in ignored and settings_a.get(name) != settings_b.get(name)
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


def compare_numbers(lines_a: Lines, lines_b: Lines, key: str, rounding: tuple[float, float]) -> Finding:
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
    differences = {where[1]: relative(a[where], b[where]) for where in both}
    worst = max(differences, key=lambda step: differences[step])
    largest = f"off by {differences[worst]:.1e} at step {worst}" if differences[worst] else "equal"
    first = first_beyond(differences, rounding)
    words = next((against(a[where], b[where]) for where in both if where[1] == first), "")
    return Finding(what, span([*differences]), largest, first, words + up_to(differences, first))


def up_to(differences: Mapping[int, float], first: int | None) -> str:
    """How large the difference was before the first step at which the runs differ."""
    earlier = [step for step in differences if first is not None and step < first]
    return f" (at most {max(differences[step] for step in earlier):.1e} up to step {earlier[-1]})" if earlier else ""


def against(a: float, b: float) -> str:
    """Two numbers, with all digits if six do not show the difference."""
    short = f"{a:.6g}", f"{b:.6g}"
    return " against ".join(short if short[0] != short[1] else (repr(a), repr(b)))


def relative(a: float, b: float) -> float:
    """The difference of two numbers relative to the greater one; NaN equals NaN and is infinitely far from numbers."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def compare_ends(run_a: Path, run_b: Path) -> Finding:
    """Compare the last steps of the runs, and whether they are finished."""
    ends: list[tuple[Any, str]] = []
    for run in (run_a, run_b):
        last = read_metrics(run / "metrics.jsonl")[-1]
        ends.append((last["step"], "finished" if "train_runtime" in last else "not finished"))
    (step_a, state_a), (step_b, state_b) = ends
    if ends[0] == ends[1]:
        return Finding("end", f"step {step_a}", state_a)
    words = f"A ends at step {step_a}, {state_a}; B at step {step_b}, {state_b}"
    return Finding("end", "", "differs", min(step_a, step_b) + (step_a != step_b), words)


def compare_checkpoints(run_a: Path, run_b: Path) -> list[Finding]:
    """Compare all tensors of the checkpoints of the same steps, in a row for each kind of file: model, optimizer, ...

    Older checkpoints may have been removed, or saved by an interruption; the newest one has to be in both runs.
    """
    a, b = complete(run_a), complete(run_b)
    newest = max([*a, *b], default=None)
    for run, found in ((run_a, a), (run_b, b)):
        if newest is None or (not found and saves_none(run)):
            return [Finding("checkpoints", "not compared: none were saved")]
        if newest not in found:
            return [Finding("checkpoints", "", "differs", newest, f"{run} has none of step {newest}")]
    differences: dict[str, dict[int, tuple[float, str]]] = {}
    for step in sorted(a.keys() & b.keys()):
        parts_a, parts_b = parts_of(a[step]), parts_of(b[step])
        for part in sorted({*parts_a, *parts_b}):
            differences.setdefault(part, {})[step] = difference_of(parts_a.get(part, {}), parts_b.get(part, {}))
    return [finding_of(f"checkpoints: {part}", part, of_steps) for part, of_steps in differences.items()] or [
        Finding("checkpoints", "not compared: they have no tensors in files that can be read")
    ]


def finding_of(what: str, part: str, of_steps: Mapping[int, tuple[float, str]], compared: str = "") -> Finding:
    """The row on tensors, from the difference at each step and its description."""
    differences = {step: difference for step, (difference, _) in of_steps.items()}
    worst = max(differences, key=lambda step: differences[step])
    largest = of_steps[worst][1] + (f" at step {worst}" if differences[worst] and len(of_steps) > 1 else "")
    first = first_beyond(differences, OPTIMIZER if part == "optimizer" else WEIGHTS)
    words = "" if first is None else of_steps[first][1] + up_to(differences, first)
    return Finding(what, compared or span([*of_steps]), largest, first, words)


def saves_none(run: Path) -> bool:
    """Whether a run was asked to save no checkpoints."""
    return (run / "config.yaml").is_file() and load(run / "config.yaml").get("checkpointing_steps") == "no"


def compare_models(run_a: Path, run_b: Path, last_a: int, last_b: int) -> Finding:
    """Compare the weights in model/ of two runs: averaged ones, if the run exports those."""
    a, b = (parts_of(run / "model") for run in (run_a, run_b))
    if not a and not b:
        return Finding("model", "not compared: neither run has model/*.safetensors")
    if not a or not b:
        return Finding("model", "", "differs", max(last_a, last_b), f"only {'A' if a else 'B'} has one")
    if last_a != last_b:
        return Finding("model", f"not compared: the runs end at steps {last_a} and {last_b}")
    of_step = {last_a: difference_of(a["model"], b["model"])}
    return finding_of("model", "model", of_step, "at the end")


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
    """The runs with the settings that affect their result, in groups that differ only in their seed; in their order.

    Raises:
        UserError: a folder has no config.yaml, or two runs of a group have the same seed.
    """
    groups: list[list[tuple[Path, dict[str, Any]]]] = []
    for run in runs:
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run}: the folder has no config.yaml; give the --output_dir of a run")
    ignored = not_in_result(*(run / "config.yaml" for run in runs))
    for run in runs:
        settings = {name: value for name, value in load(run / "config.yaml").items() if name not in ignored}
        group = next((each for each in groups if decisive(each[0][1]) == decisive(settings)), None)
        if group is None:
            groups.append(group := [])
        for other, others in group:
            if others["seed"] == settings["seed"]:
                raise UserError(f"{other} and {run} have the same settings and the same seed; give one of them")
        group.append((run, settings))
    return groups


def decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of runs: all except the seed."""
    return {name: value for name, value in settings.items() if name != "seed"}


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
