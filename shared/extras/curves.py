"""The picture of a run: what metrics.jsonl holds, on one page, drawn once at the end."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.extras.costs import COMPUTED, NAMES

NO_SCORES = ("_loss", "_runtime", "_per_second", "_samples", "_count")  # ends of eval_ keys that are not scores
WIDE, HIGH = 3.6, 2.5  # inches, the cell of a panel
LEFT, RIGHT, TOP, BOTTOM, ROW = 0.2, 0.03, 0.13, 0.2, 0.06  # shares of a cell beside its axes; of a row of a legend
FEW = 40  # points; a series of at most so many gets dots
LARGEST = 1e100  # a value that is shown; so that no computation overflows
# Color-blind readers can tell the lines apart.
STYLE: list[Any] = [
    "seaborn-v0_8-whitegrid",
    "tableau-colorblind10",
    {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": True, "lines.markersize": 5},
    {"grid.color": "0.92", "axes.edgecolor": "0.8"},
]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `top` is the least upper end of the y axis."""

    title: str
    series: dict[str, tuple[Any, Any]]  # steps and values
    unit: str = ""
    top: float = 0
    from_zero: bool = True


def draw_curves(lines: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw the lines of a metrics.jsonl (`log.read_metrics`) into the PNG file `picture`.

    A panel for each thing that was logged: loss, scores, learning rate, gradient norm, throughput, where time goes.
    A value that is not finite, or beyond LARGEST, leaves a gap; text, such as the digest of the samples, is left out.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about fonts and layouts
        from matplotlib import style
        from matplotlib.figure import Figure  # not pyplot, which has global state and looks for a display

        panels = find_panels(lines)
        columns = min(3, max(1, len(panels)))
        rows = max(1, math.ceil(len(panels) / columns))
        last_step = max([1, *(line["step"] for line in lines)])
        with style.context(STYLE):
            figure = Figure(figsize=(WIDE * columns, HIGH * rows), dpi=150)
            for position, panel in enumerate(panels):
                column, row = position % columns, rows - 1 - position // columns
                many = len(panel.series) > 3  # inside the axes, their legend would hide what it explains
                below = BOTTOM + many * min(ROW * math.ceil(len(panel.series) / 2), 0.5)
                size = (1 - LEFT - RIGHT) / columns, (1 - TOP - below) / rows
                axes = figure.add_axes(((column + LEFT) / columns, (row + below) / rows, *size))
                draw_panel(axes, panel, last_step)
                if many:
                    place, unit = ((column + 0.5) / columns, row / rows), figure.transFigure
                    axes.legend(loc="lower center", bbox_to_anchor=place, bbox_transform=unit, ncols=2, fontsize=7)
                elif all(panel.series):  # they have names
                    axes.legend()
            figure.savefig(picture)


def find_panels(lines: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The panels that have logged values, in reading order."""
    keys = dict.fromkeys(key for line in lines for key in line)  # in the order of their first appearance

    def series(labels: Mapping[str, str], scale: float = 1) -> dict[str, tuple[Any, Any]]:
        found = {}
        for key, label in labels.items():
            points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
            values = [value * scale if abs(value) < LARGEST else math.nan for _, value in points]
            if not all(map(math.isnan, values)):
                found[label] = [step for step, _ in points], values
        return found

    names = {key: key.removeprefix("eval_").replace("_", " ") for key in keys if key.startswith("eval_")}
    scores = series({key: name for key, name in names.items() if not key.endswith(NO_SCORES)})
    # Correlations may be negative; an error in the target's own unit would flatten the scores beside it.
    scores = {name: both for name, both in scores.items() if not any(abs(value) > 1 for value in both[1])}
    parts = {part: NAMES[part] for part in COMPUTED}
    rate = "tokens" if "tokens_per_second" in keys else "samples"
    panels = [
        Panel("Loss", series({"loss": "training", "eval_loss": "evaluation"}), from_zero=False),
        Panel("Evaluation", scores, from_zero=False),
        Panel("Learning rate", series({"learning_rate": ""})),
        Panel("Gradient norm before clipping", series({"grad_norm": ""})),
        Panel("Throughput", series({f"{rate}_per_second": ""}), f"{rate} per second"),
        Panel("Waiting for data", series({"data_wait": ""}, 100), "% of the time", top=5),
        Panel("Where a step's time goes", series(parts, 100), "% of the time", top=100),
        Panel("Memory at its peak", series({"peak_memory_bytes": ""}, 2**-20), "MiB"),
        Panel("MFU and padding", series({"mfu": "MFU", "padding": "padding"}, 100), "%", top=5),
    ]
    return [panel for panel in panels if panel.series]


def draw_panel(axes: Any, panel: Panel, last_step: int) -> None:
    """Draw one panel."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for label, (steps, values) in panel.series.items():
        axes.plot(steps, values, marker="o" if len(steps) <= FEW else None, label=label)
    axes.set_title(panel.title)
    axes.set_title(panel.unit, loc="right", fontsize=8)
    axes.set_xlabel("step")
    axes.set_xlim(-0.02 * last_step, last_step * 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if panel.from_zero:
        axes.update_datalim([(0, 0), (0, panel.top)])
        axes.autoscale_view(scalex=False)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
