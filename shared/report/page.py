"""Writes report.html from the files of a run's folder, with its charts; page.html beside this file is its template.

The hook `Report` also says where the time went, and draws curves.png.
"""

import base64
import dataclasses
import hashlib
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.config import options
from shared.disk import replace_file
from shared.errors import UserError, about, count_of
from shared.extras.costs import NAMES, breakdown, facts, seconds_by_part
from shared.extras.curves import LARGEST, STYLE, Panel, draw_curves, draw_panel, find_panels
from shared.monitoring.hooks import Hook
from shared.monitoring.log import put, read_metrics
from shared.report import mistakes
from shared.report.mistakes import not_fatal
from shared.run.recipes import recipe_of

REPORT, CARD, CURVES, METRICS = "report.html", "launch_card.txt", "curves.png", "metrics.jsonl"
WIDTH, HEIGHT = 331, 158  # of a figure, in points
AXES = (0.14, 0.22, 0.79, 0.72)  # left, bottom, width and height, as shares of the figure
# The colors of the page, light or dark, take the place of these.
COLORS = {
    f"#01020{i}": name for i, name in enumerate(("--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--rule", "--pale"))
}
*LINES, RULE, PALE = COLORS
PAGE_STYLE = {
    "svg.fonttype": "none",
    "axes.prop_cycle": f"cycler(linestyle=['-', '--']) * cycler(color={LINES})",
    **dict.fromkeys(("grid.color", "axes.edgecolor"), RULE),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), PALE),
}
MOST_POINTS = 400  # of a line
# Settings of one run alone: another one would copy its checkpoints from the mirror, or replace its model on the Hub.
OF_ONE_RUN = {"expect_processes": "None", "mirror_checkpoints": "None", "push_to_hub": "False", "hub_model_id": "None"}

Floats = NDArray[np.float64]


class Report(Hook):
    """Writes launch_card.txt when a run begins, and curves.png and report.html when it has ended."""

    def begun(self, run: Any) -> None:
        """Write the launch card on the main process; a run from the start has made no mistakes yet."""
        if run.accelerator.is_main_process:
            folder = Path(run.config.output_dir)
            with not_fatal(CARD):
                replace_file(folder / CARD, run.launch_card + "\n")
                if not run.checkpoint:
                    (folder / mistakes.FILE).unlink(missing_ok=True)

    def ended(self, run: Any) -> None:
        """Print where the time went and where the page is."""
        config, folder = run.config, Path(run.config.output_dir)
        if run.finished and (folder / REPORT).is_file():
            return
        lines = read_metrics(folder / METRICS)
        # Flags that are already set, that FSDP refuses, or that the recipe lacks are no advice.
        compressed = config.gradient_compression != "none" or run.accelerator.is_fsdp2
        if said := breakdown(lines, compressed, unpacked=getattr(config, "packing", None) is False):
            put(said)
        with not_fatal(CURVES):
            draw_curves(lines, folder / CURVES)
        with not_fatal(REPORT):
            put(f"  {write_report(folder)} shows the run in a browser")


def write_report(folder: Path) -> Path:
    """Write report.html into the output folder of a run, finished or not, and return its path.

    Raises:
        UserError: the folder is not that of a run, or one of its files is damaged.
    """
    file = folder / REPORT
    with about(str(folder)):  # others may read the folder, and not write it
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
    # The page allows its own script, by its digest, and no other to run.
    environment.filters["sha256"] = lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    lines = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    with about(str(folder / mistakes.FILE)):
        found = json.loads(text_in(folder / mistakes.FILE) or "{}")
    evaluations = [line for line in reversed(lines) if "eval_loss" in line]
    spent = seconds_by_part(lines)
    last_step = max((int(line["step"]) for line in lines), default=0)
    return template.render(
        name=options.load(folder / "config.yaml").get("run_name") or folder.resolve().name,
        steps=count_of(last_step, "step"),
        end=lines[-1] if lines else {},
        evaluations=evaluations,
        scores=[key for key in (evaluations or [{}])[0] if key.startswith("eval_")],
        figures=[figure_of(panel, max(1, last_step)) for panel in find_panels(lines)],
        found=found,
        exp=math.exp,
        scatter=scatter(found["points"]) if found.get("points") else None,
        size=f"{WIDTH} {HEIGHT}",
        spent={NAMES[part]: seconds for part, seconds in spent.items() if seconds > 0},
        total=sum(spent.values()),
        facts=facts(lines) if spent else [],
        card=card_rows(folder / CARD),
        command=command(folder),
        settings=text_in(folder / "config.yaml"),
    )


def text_in(file: Path) -> str:
    """The text of a file; "" if it does not exist."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def card_rows(file: Path) -> list[tuple[str, str]]:
    """The rows of the launch card; of an older run, none."""
    return re.findall(r"^  (\S.*?)  +(.*)$", text_in(file), re.MULTILINE)


def command(folder: Path) -> str:
    """The command that trains again with the same settings, into another folder; "" if the recipe is unknown."""
    if (recipe := recipe_of(folder / "config.yaml")) is None:
        return ""
    shown = recipe.relative_to(options.PROJECT) if recipe.is_relative_to(options.PROJECT) else recipe
    again, stored = folder.with_name(f"{folder.name}-again"), options.load(folder / "config.yaml")
    words = ["python", str(shown), "--config", str(folder / "config.yaml"), "--output_dir", str(again)]
    reset = [[f"--{name}", value] for name, value in OF_ONE_RUN.items() if str(stored.get(name, value)) != value]
    return shlex.join(sum(reset, words))


def drawn(draw: Callable[[Any], object]) -> tuple[Any, str]:
    """The axes on which `draw` has drawn, and their drawing in the colors of the page."""
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    with style.context([*STYLE, PAGE_STYLE]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        axes = figure.add_axes(AXES)
        draw(axes)
        figure.savefig(file, format="svg", transparent=True)
    drawing = file.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]  # without its head, which has addresses
    for color, name in COLORS.items():
        drawing = drawing.replace(color, f"var({name})")
    return axes, drawing


def points_on(axes: Any, x: Any, y: Any, said: Iterable[str]) -> list[list[Any]]:
    """The finite ones of points [n], with what they say: [x, y, text]."""
    places = axes.transData.transform(np.stack([x, y], 1)).round(1).tolist()
    return [[x, HEIGHT - y, text] for (x, y), text in zip(places, said, strict=True) if math.isfinite(y)]


def figure_of(panel: Panel, last_step: int) -> dict[str, Any]:
    """The drawing of a panel of curves.png, each line with at most MOST_POINTS points."""
    lines = {label: thinned(np.array(steps), np.array(values)) for label, (steps, values) in panel.series.items()}
    plain = dataclasses.replace(panel, title="", unit="", series=lines)
    axes, drawing = drawn(lambda axes: draw_panel(axes, plain, last_step))
    unit = f" {panel.unit}" if panel.unit else ""
    points = []
    for label, (steps, values) in lines.items():
        each = zip(steps.tolist(), values.tolist(), strict=True)
        said = (f"step {step:,.0f}: {label or panel.title.lower()} {value:.5g}{unit}" for step, value in each)
        points += points_on(axes, steps, values, said)
    last = {label or "last": f"{values[-1]:.4g}" for label, (_, values) in panel.series.items()}
    return {"title": panel.title, "unit": panel.unit, "drawing": drawing, "points": points, "last": last}


def scatter(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The drawing of [target, prediction] pairs, with the diagonal on which both are equal."""
    targets, predictions = both = np.clip(np.array(pairs, np.float64), -LARGEST, LARGEST).T

    def draw(axes: Any) -> None:
        axes.plot(targets, predictions, linestyle="", marker="o")
        axes.plot([both.min(), both.max()], [both.min(), both.max()])
        axes.set_xlabel("target")

    axes, drawing = drawn(draw)
    said = (f"is {target:.5g}, predicted {prediction:.5g}" for target, prediction in pairs)
    points = points_on(axes, targets, predictions, said)
    return {"title": "Predictions and targets", "unit": "prediction", "drawing": drawing, "points": points, "last": {}}


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
