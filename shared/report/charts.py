"""Charts as figures for page.html: where lines, points and ticks are in an SVG, and what each point says."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.extras.curves import FEW, Panel

Floats = NDArray[np.float64]
ACROSS, UP = (58, 422), (184, 10)  # the ends of the axes, in the units of a figure
FRAME = {"width": 460, "height": 220, "left": ACROSS[0], "right": ACROSS[1], "top": UP[1], "bottom": UP[0]}
MOST_POINTS = 400  # of a line
SMALLEST, LARGEST = 1e-300, 1e300  # a difference of values, and a value; so that no computation overflows


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
        scaled = self._scaled(values)
        self.low, self.high = float(np.nanmin(scaled)), float(np.nanmax(scaled))
        size = max(abs(self.low), abs(self.high))
        if self.high - self.low <= 1e-9 * size + SMALLEST:  # a single value is in the middle
            margin = 0.5 if log else size / 2 or 1.0
            self.low, self.high = self.low - margin, self.high + margin
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
        values = self._powers() if self.log else self._multiples()
        places = self.places(np.array(values)).round(1).tolist()
        return [(at, say(value)) for at, value in zip(places, values, strict=True) if value % 1 == 0 or not whole]

    def _powers(self) -> list[float]:
        """Powers of ten, of few ones also 2 and 5 times each."""
        factors = (1, 2, 5) if self.high - self.low < 2 else (1,)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if self.low <= math.log10(value) <= self.high]
        return found[:: -(-len(found) // self.most_ticks) or 1]

    def _multiples(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        finest = (self.high - self.low) / self.most_ticks
        power = 10.0 ** math.floor(math.log10(finest))
        step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= finest)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def curves(panel: Panel, last_step: int) -> dict[str, Any]:
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
        "y": y.ticks(panel.ticks or short),
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


def short(value: float) -> str:
    """A value at a tick."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 and value % 1 == 0 else f"{value:.4g}"
