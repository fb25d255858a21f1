"""curves.png shows names, shapes and single points correctly, and drawing it prints nothing."""

import math

import numpy as np
import pytest
from PIL import Image
from training_line import TRAINING

from shared.extras.curves import Picture, draw_curves, families_for, find_panels, legible, short_power, shortened

LINES = [{"step": 10, "loss": 1.0, "data_wait": 0.0}, {"step": 10, **{f"eval_{name}": 1.0 for name in "abcdef"}}]
NAMES = [
    *(
        "African hunting dog, hyena dog, Cape hunting dog, Lycaon pictus",
        "\u732b",
        "\u0939\u093e\u0925\u0940",
        "$x^2$ and $",
    ),
    *("two\nlines", "", "\ud800", "\U0001f600", "\u200b"),
]


def drawn(path, pictures):
    """Draw the curves of a run and return the grey values of the picture."""
    draw_curves(LINES, path, pictures)
    return np.asarray(Image.open(path).convert("L"))


def bounds(dark):
    """Height and width of the dark area."""
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    return rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1


@pytest.mark.filterwarnings("error")
def test_any_class_name_is_drawn_without_a_warning(tmp_path, capfd, caplog):
    pixels = np.zeros((4, 4, 3), np.uint8)
    drawn(tmp_path / "curves.png", [Picture(pixels, name, name) for name in NAMES])
    out, err = capfd.readouterr()
    assert not out + err
    assert not caplog.records


@pytest.mark.parametrize("aspect", [1.0, 2.0, 0.5])
def test_a_picture_has_the_aspect_ratio_of_its_image(tmp_path, aspect):
    """Images are decoded as squares; the drawn picture has the aspect ratio of the original."""
    magenta = np.full((8, 8, 3), (255, 0, 255), np.uint8)
    draw_curves(LINES, tmp_path / "curves.png", [Picture(magenta, "a", "b", aspect)])
    shown = np.asarray(Image.open(tmp_path / "curves.png").convert("RGB")).astype(int)
    height, width = bounds((shown[..., 0] > 250) & (shown[..., 1] < 5) & (shown[..., 2] > 250))
    assert width / height == pytest.approx(aspect, rel=0.03)


def test_captions_of_neighbours_do_not_touch(tmp_path):
    """Between the long names of two pictures there is an empty column of pixels."""
    white = np.full((8, 8, 3), 255, np.uint8)
    name = "Staffordshire bullterrier \u0431\u043e\u043b\u044c\u0448\u0430\u044f WM 0123456789"
    page = drawn(tmp_path / "curves.png", [Picture(white, name, name)] * 8)
    captions = page[-int(1.8 * 150) :]
    empty = (captions > 200).all(0)
    gaps = np.flatnonzero(np.diff(empty.astype(int)) == -1)  # where ink begins after a gap
    wide = [start for start in gaps if empty[max(0, start - 8) : start].all()]
    assert len(wide) >= 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exactly 10", "exactly 10"),
        ("abcdefghijklmnop", "abcde\u2026mnop"),
        ("\u732b" * 5, "\u732b" * 5),  # twice as wide as a letter
        ("\u732b" * 9, "\u732b\u732b\u2026\u732b\u732b"),
    ],
)
def test_a_long_name_is_shortened_in_the_middle(text, expected):
    assert shortened(text, 10) == expected


def test_a_character_that_no_font_has_is_written_as_its_code():
    private = "\U0010ff00"
    families, missing = families_for({"a", private})
    assert families[0] == "sans-serif"
    assert missing <= {private}
    assert legible("a\n \u732b b", {"\u732b"}) == "a \\u732b b"


def test_a_character_that_the_default_font_lacks_comes_from_another():
    families, missing = families_for({"\U0001d4d0"})  # a mathematical script capital: matplotlib has a font for it
    assert len(families) == 2
    assert not missing


def test_a_single_point_and_a_line_at_the_edge_are_fully_visible():
    from matplotlib.figure import Figure

    from shared.extras.curves import Panel, draw_panel

    axes = Figure().subplots()
    draw_panel(axes, Panel("x", {"zero": ([10], [0.0]), "full": ([10], [100.0])}, top=100), last_step=10)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0 < right - 10
    assert low < 0 < high - 100
    assert all(line.get_marker() == "o" and line.get_markersize() > 4 for line in axes.get_lines())


def test_each_panel_shows_the_right_figures():
    lines = [
        {"step": 1, **TRAINING, "grad_norm": math.inf},
        {
            "step": 1,
            "eval_loss": 0.5,
            "eval_accuracy": 0.25,
            "eval_matthews": -0.5,
            "eval_runtime": 0.5,
            "eval_mse": 9.0,
        },
        {"step": 2, **TRAINING, "grad_norm": 2.0},
        {"step": 2, "train_runtime": 3.0},
    ]
    panels = {panel.title: panel for panel in find_panels(lines)}
    assert panels["Loss"].series == {"training": ([1, 2], [0.43211, 0.43211]), "evaluation": ([1], [0.5])}
    assert panels["Evaluation"].series == {"accuracy": ([1], [0.25]), "matthews": ([1], [-0.5])}
    (norms,) = panels["Gradient norm before clipping"].series.values()
    assert math.isnan(norms[1][0])
    assert norms[1][1] == 2.0
    assert panels["Throughput"].unit == "tokens per second"
    assert panels["Waiting for data"].series == {"": ([1, 2], [1.0, 1.0])}
    shares = {"forward_backward": 0.75, "communication": 0.125, "optimizer": 0.0625}
    timed = find_panels([{"step": 4, **shares, "mfu": 0.5, "padding": 0.25, "peak_memory_bytes": 3.0 * 2**20}])
    assert [(panel.title, panel.series) for panel in timed if panel.series] == [
        (
            "Where a step's time goes",
            {"compute": ([4], [75]), "communication": ([4], [12.5]), "optimizer": ([4], [6.25])},
        ),
        ("Memory at its peak", {"": ([4], [3.0])}),
        ("MFU and padding", {"MFU": ([4], [50]), "padding": ([4], [25])}),
    ]
    without_text = find_panels([{"step": 1, "loss": 1.0, "samples_per_second": 2.0}])
    assert [panel.title for panel in without_text if panel.series] == ["Loss", "Throughput"]


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
def test_any_record_can_be_drawn(lines, tmp_path):
    draw_curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("rate", "text"), [(3e-4, "3e-4"), (2.5e-4, "2.5e-4"), (0.1, "1e-1"), (1e-10, "1e-10"), (0, "0")]
)
def test_labels_of_learning_rates_are_short(rate, text):
    assert short_power(rate) == text
