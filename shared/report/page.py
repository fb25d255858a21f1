"""Writes report.html from the files of a run's folder, with its charts; page.html beside this file is its template."""

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from shared.config import options
from shared.disk import replace_file
from shared.errors import UserError, about, count_of
from shared.extras.curves import FEW, Panel, find_panels, short
from shared.extras.time_report import NAMES, facts, of_last_processes, seconds_by_part
from shared.monitoring.hooks import Hook
from shared.monitoring.log import not_fatal, read_metrics
from shared.report import mistakes

REPORT, CARD = "report.html", "launch_card.txt"
MOST_EVALUATIONS = 12  # in their table
WATCHED = ("loss", "eval_loss", "grad_norm")  # the page says how often they were not finite
ACROSS, UP = (58, 422), (184, 10)  # the ends of the axes, in the units of a figure
FRAME = {"width": 460, "height": 220, "left": ACROSS[0], "right": ACROSS[1], "top": UP[1], "bottom": UP[0]}
MOST_POINTS = 400  # of a line
SMALLEST, LARGEST = 1e-100, 1e100  # a difference of values, and a value; so that no computation overflows

Floats = NDArray[np.float64]


class Report(Hook):
    """Writes launch_card.txt when a run begins, and report.html when it has ended; says where that is."""

    def begun(self, run: Any) -> None:
        """Write the launch card on the main process; a run from the start has made no mistakes yet."""
        if run.accelerator.is_main_process:
            folder = Path(run.config.output_dir)
            with not_fatal(CARD):
                replace_file(folder / CARD, run.launch_card + "\n")
                if not run.resumed:
                    (folder / mistakes.FILE).unlink(missing_ok=True)

    def ended(self, run: Any) -> None:
        """Write the page."""
        with not_fatal(REPORT):
            file = write_report(Path(run.config.output_dir))
            with tqdm.external_write_mode():
                print(f"  {file} shows the run in a browser", flush=True)


def write_report(folder: Path) -> Path:
    """Write report.html into the output folder of a run, finished or not, and return its path.

    Raises:
        UserError: the folder is not that of a run, or one of its files is damaged.
    """
    file = folder / REPORT
    replace_file(file, page(folder))
    return file


def page(folder: Path) -> str:
    """The page of a run. Whatever a file of the run lacks is left out; all texts are escaped.

    Raises:
        UserError: see `write_report`.
    """
    from jinja2 import Environment, StrictUndefined

    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: the folder has no config.yaml: give the --output_dir of a run")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = digest
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    with about(str(folder / mistakes.FILE)):
        found = json.loads(read(folder / mistakes.FILE) or "{}")
    last_step = max((int(line["step"]) for line in lines), default=0)
    return template.render(
        name=options.load(folder / "config.yaml").get("run_name") or folder.resolve().name,
        status=status(lines, last_step),
        notes=not_finite(lines),
        evaluations=evaluations(lines),
        figures=[figure_of(panel, last_step) for panel in find_panels(lines) if panel.series],
        found=found,
        classes=classes(found),
        worst=worst(found),
        scatter=scatter(found["points"]) if found.get("points") else None,
        time=time(lines),
        card=card(folder / CARD),
        command=command(folder),
        settings=read(folder / "config.yaml"),
    )


def read(file: Path) -> str:
    """The text of a file; "" if it does not exist."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def digest(script: str) -> str:
    """The digest by which the page allows its own script, and no other, to run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def status(lines: Sequence[Mapping[str, Any]], last_step: int) -> str:
    """How far the run has come."""
    steps = count_of(last_step, "step")
    if not lines or "train_runtime" not in lines[-1]:
        return f"{steps} so far; the run has not finished"
    return f"finished: {steps} in {lines[-1]['train_runtime']:,.1f} s"


def not_finite(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each figure that was NaN or infinite."""
    found = {key: [math.isfinite(line[key]) for line in lines if key in line] for key in WATCHED}
    return [
        f"{key} is not finite in {finite.count(False):,} of {count_of(len(finite), 'line')}"
        for key, finite in found.items()
        if not all(finite)
    ]


def evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of the evaluations, of many some of them, evenly spread, and the last one."""
    all_rows = [line for line in lines if "eval_loss" in line]
    every = -(-len(all_rows) // MOST_EVALUATIONS) or 1
    rows = all_rows[::-1][::every][::-1]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key.startswith("eval_")]
    return {
        "names": [key.removeprefix("eval_").replace("_", " ") for key in keys],
        "rows": [(f"{row['step']:,}", [f"{row[key]:.4g}" if key in row else "" for key in keys]) for row in rows],
        "left_out": len(all_rows) - len(rows),
    }


def classes(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The rows of the table of the classes: count, precision, recall, F1; "" where nothing is divided."""

    def ratio(part: int, whole: int) -> str:
        return f"{part / whole:.3f}" if whole else ""

    return [
        (name, [f"{true:,}", ratio(hits, predicted), ratio(hits, true), ratio(2 * hits, true + predicted)])
        for name, true, predicted, hits in found.get("classes", [])
    ]


def worst(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The worst samples, each with lines that say which one it is and how wrong."""
    samples = []
    for sample in found["worst"] if found else []:
        loss = float(sample["loss"])
        chance = [f"{100 * math.exp(-loss):.2g} % for the right class"] if "confused" in found else []
        samples.append(sample | {"said": [*chance, f"loss {loss:.4g}, sample {sample['row']:,}"]})
    return samples


def time(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the time went: its parts, and what the end of a run says about it besides them and its advice."""
    recent, where = of_last_processes(lines)
    spent = seconds_by_part(recent)
    total = sum(spent.values())
    if not total:
        return {"parts": []}
    parts = [(NAMES[part], seconds, f"{100 * seconds / total:.0f}") for part, seconds in spent.items() if seconds > 0]
    return {"parts": parts, "said": [f"{total:,.1f} s in all{where}", *facts(recent)]}


def card(file: Path) -> list[tuple[str, str]]:
    """The rows of the launch card; of an older run, none."""
    return re.findall(r"^  (\S.*?)  +(.*)$", read(file), re.MULTILINE)


def command(folder: Path) -> str:
    """The command that trains again with the same settings, into another folder; "" if the recipe is unknown."""
    recipe = options.recipe_of(folder / "config.yaml")
    if recipe is None:
        return ""
    shown = recipe.relative_to(options.PROJECT) if recipe.is_relative_to(options.PROJECT) else recipe
    again = folder.with_name(f"{folder.name}-again")
    return shlex.join(["python", str(shown), "--config", str(folder / "config.yaml"), "--output_dir", str(again)])


class Axis:
    """One axis: where values are in the figure, and its ticks.

    Args:
        values: all that it shows; at least one of them is finite.
        ends: where the axis begins and ends in the figure.
        log: whether it has a logarithmic scale, which leaves out what is not positive.
        tick: how many units of the figure a tick needs.
    """

    def __init__(self, values: Floats, ends: tuple[float, float], log: bool = False, tick: float = 26) -> None:
        self.log, self.ends = log, ends
        from matplotlib.transforms import nonsingular

        scaled = self._scaled(values)
        # A single value is in the middle.
        self.low, self.high = nonsingular(float(np.nanmin(scaled)), float(np.nanmax(scaled)), 0.5, tiny=1e-9)
        self.most_ticks = max(2, int(abs(ends[1] - ends[0]) / tick))

    def _scaled(self, values: Any) -> Floats:
        values = np.asarray(values, np.float64)
        clipped = np.clip(values, SMALLEST if self.log else -LARGEST, LARGEST)
        shown = np.isfinite(values) & ((values > 0) | (not self.log))
        return np.where(shown, np.log10(clipped) if self.log else clipped, np.nan)

    def places(self, values: Any) -> Floats:
        """Where values are in the figure; NaN for those that are not shown."""
        share = (self._scaled(values) - self.low) / (self.high - self.low)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    def ticks(self, say: Callable[[float], str], whole: bool = False) -> list[tuple[float, str]]:
        """The places and texts of round values, ascending; if `whole`, of whole numbers only."""
        from matplotlib.ticker import MaxNLocator

        if self.log:  # powers of ten; of few ones also 2 and 5 times each
            factors = [1, 2, 5] if self.high - self.low < 2 else [1]
            found = np.outer(10.0 ** np.arange(math.floor(self.low), self.high + 1), factors).ravel()
        else:
            found = np.array(MaxNLocator(self.most_ticks, steps=[1, 2, 5, 10]).tick_values(self.low, self.high))
        first, last = sorted(self.ends)
        both = zip(self.places(found).round(1).tolist(), found.tolist(), strict=True)
        seen = [(at, say(value)) for at, value in both if first <= at <= last and (value % 1 == 0 or not whole)]
        return seen[:: -(-len(seen) // (self.most_ticks + 1)) or 1]


def figure_of(panel: Panel, last_step: int) -> dict[str, Any]:
    """The figure of a panel of curves.png, each line with at most MOST_POINTS points."""
    lines = {label: thinned(np.array(steps), np.array(values)) for label, (steps, values) in panel.series.items()}
    steps, values = (np.concatenate([each[part] for each in lines.values()]) for part in (0, 1))
    log_steps, log_values = panel.log_steps and steps.max() > 0, panel.log_values and np.nanmax(values) > 0
    base = [0.0, panel.top] if panel.from_zero and not log_values else []
    x = Axis(steps if log_steps else np.append(steps, [0, last_step]), ACROSS, log_steps, tick=72)
    y = Axis(np.append(values, base), UP, log_values)
    unit = f" {panel.unit}" if panel.unit and panel.unit != "log scale" else ""
    series = []
    for label, (at, found) in lines.items():
        places = np.stack([x.places(at), y.places(found)], 1)
        said = [
            f"step {step:,.0f}: {label or panel.title.lower()} {value:.5g}{unit}"
            for step, value in zip(at.tolist(), found.tolist(), strict=True)
        ]
        last = f"{panel.series[label][1][-1]:.4g}"
        series.append({"label": label or "last", "last": last, "path": path(places), "points": dots(places, said)})
    return FRAME | {
        "title": panel.title,
        "unit": panel.unit,
        "below": "step (log scale)" if log_steps else "step",
        "x": x.ticks("{:,.0f}".format, whole=True),
        "y": y.ticks(short),
        "series": series,
        "with_dots": len(steps) <= FEW * len(lines),
    }


def scatter(points: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The figure of [target, prediction] pairs, with the diagonal on which both are equal."""
    both = np.array(points, np.float64)
    x, y = Axis(both, ACROSS, tick=72), Axis(both, UP)
    places = np.stack([x.places(both[:, 0]), y.places(both[:, 1])], 1)
    said = [f"is {target:.5g}, predicted {prediction:.5g}" for target, prediction in points]
    diagonal = path(np.array([[ACROSS[0], UP[0]], [ACROSS[1], UP[1]]]))
    return FRAME | {
        "title": "Predictions and targets",
        "unit": "prediction",
        "below": "target",
        "x": x.ticks(short),
        "y": y.ticks(short),
        "series": [{"path": "", "points": dots(places, said)}, {"path": diagonal, "points": []}],
        "with_dots": True,
    }


def thinned(steps: NDArray[Any], values: Floats) -> tuple[Floats, Floats]:
    """At most MOST_POINTS of the points, in their order: the ends, and the extremes of equal parts, so spikes stay."""
    steps, values = steps.astype(np.float64), values.astype(np.float64)
    if len(steps) <= MOST_POINTS:
        return steps, values
    kept = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), MOST_POINTS // 2 - 1):
        finite = part[np.isfinite(values[part])]
        kept |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {part[0]}
    places = np.array(sorted(kept))
    return steps[places], values[places]


def path(places: Floats) -> str:
    """A line through points [n, 2] of the figure, with gaps where one is NaN; a point between gaps is a dot."""
    words, pen = [], False
    for x, y in places:
        if shown := math.isfinite(x) and math.isfinite(y):
            words.append(f"L{x:.1f} {y:.1f}" if pen else f"M{x:.1f} {y:.1f}h0")
        pen = shown
    return "".join(words)


def dots(places: Floats, said: Sequence[str]) -> list[list[Any]]:
    """The visible ones of points [n, 2], with what they say: [x, y, text]."""
    seen = zip(places.round(1).tolist(), said, strict=True)
    return [[*place, text] for place, text in seen if all(map(math.isfinite, place))]
