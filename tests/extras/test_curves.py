"""curves.png shows the right figures and single points, and drawing it prints nothing."""

import math

import pytest
from training_line import TRAINING

from shared.extras.curves import Panel, draw_curves, draw_panel, find_panels


def test_a_single_point_and_a_line_at_the_edge_are_fully_visible():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_panel(axes, Panel("x", {"zero": ([10], [0.0]), "full": ([10], [100.0])}, top=100), last_step=10)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0 < right - 10
    assert low < 0 < high - 100
    assert all(line.get_marker() == "o" and line.get_markersize() > 4 for line in axes.get_lines())


def test_each_panel_shows_the_right_figures():
    lines = [
        {"step": 1, **TRAINING, "grad_norm": math.inf},
        {"step": 1, "eval_loss": 0.5, "eval_accuracy": 0.25, "eval_r": -0.5, "eval_runtime": 0.5, "eval_mse": 9.0},
        {"step": 2, **TRAINING, "grad_norm": 2.0},
        {"step": 2, "train_runtime": 3.0},
    ]
    panels = {panel.title: panel for panel in find_panels(lines)}
    assert panels["Loss"].series == {"training": ([1, 2], [0.43211, 0.43211]), "evaluation": ([1], [0.5])}
    assert panels["Evaluation"].series == {"accuracy": ([1], [0.25]), "r": ([1], [-0.5])}
    (norms,) = panels["Gradient norm before clipping"].series.values()
    assert math.isnan(norms[1][0])
    assert norms[1][1] == 2.0
    assert panels["Throughput"].unit == "tokens per second"
    assert panels["Waiting for data"].series == {"": ([1, 2], [1.0, 1.0])}
    shares = {"forward_backward": 0.75, "communication": 0.125, "optimizer": 0.0625}
    timed = find_panels([{"step": 4, **shares, "mfu": 0.5, "padding": 0.25, "peak_memory_bytes": 3.0 * 2**20}])
    parts = {"compute": ([4], [75]), "communication": ([4], [12.5]), "optimizer": ([4], [6.25])}
    memory, of_peak = {"": ([4], [3.0])}, {"MFU": ([4], [50]), "padding": ([4], [25])}
    expected = {"Where a step's time goes": parts, "Memory at its peak": memory, "MFU and padding": of_peak}
    assert [(panel.title, panel.series) for panel in timed] == [*expected.items()]
    without_text = find_panels([{"step": 1, "loss": 1.0, "samples_per_second": 2.0}])
    assert [panel.title for panel in without_text] == ["Loss", "Throughput"]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 0, "eval_loss": 1.0}],
        [{"step": 1, "loss": math.nan, "grad_norm": math.nan}],
        [{"step": 1, "loss": 0.0, "learning_rate": 0.0, "grad_norm": 0.0, "data_wait": 0.0, "samples": "ab"}],
        [{"step": step, **{f"eval_{number}": 0.5 for number in range(9)}} for step in (1, 2)],
        [{"step": step, "loss": 1.0, "grad_norm": 1000.0 if step == 5 else 1.0} for step in range(1, 99)],
    ],
)
@pytest.mark.filterwarnings("error")
def test_any_record_can_be_drawn_without_a_warning(lines, tmp_path, capfd, caplog):
    draw_curves(lines, tmp_path / "curves.png")
    assert not "".join(capfd.readouterr())
    assert not caplog.records
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
