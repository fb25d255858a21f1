"""report.html can be made of any record of a run, loads nothing, and shows all texts as texts."""

import html.parser
import json
import math
import re
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import write_run
from training_line import TRAINING

from shared.config import options
from shared.extras.curves import Panel
from shared.report import page
from shared.report.mistakes import mistakes
from shared.report.page import Report

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&amp;{{ 7 * 7 }}"
STEP = {"step": 3}
NUMBERS = st.one_of(
    st.floats(), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308, -1e308, 1.0, 3])
)
KEYS = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "data_wait", "eval_loss", "eval_f1", "mfu", "other"]


class Texts(html.parser.HTMLParser):
    """The names of all elements, and their texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data):
        self.texts.append(data)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), NUMBERS), max_size=6))
def test_any_figures_give_a_page_whose_curves_are_inside_their_frames(tmp_path_factory, records):
    lines = [{"step": number, **record} for number, record in enumerate(records)]
    folder = write_run(tmp_path_factory.mktemp("run"), lines)
    text = page.page(folder)
    assert "nan" not in "".join(re.findall(r' (?:d|[xy]|c[xy])="([^"]*)"', text))
    for points in re.findall("data-points='([^']*)'", text):
        for x, y, said in json.loads(points):
            left, bottom, width, height = page.AXES
            assert left - 0.001 <= x / page.WIDTH <= left + width + 0.001
            assert bottom - 0.001 <= 1 - y / page.HEIGHT <= bottom + height + 0.001
            assert said.startswith("step ")


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1, max_size=60))
def test_any_text_is_shown_as_it_is_and_adds_no_element(tmp_path_factory, text):
    found = mistakes((text, "b"), lambda _: {"text": text}, np.array([1]), np.array([2.0]), np.array([0]))
    folder = tmp_path_factory.mktemp("run")
    renamed = json.loads(json.dumps(found).replace(json.dumps(text), '"a"'))
    plain = Texts(page.page(write_run(folder, [], renamed | STEP)))
    shown = Texts(page.page(write_run(folder, [], found | STEP)))
    assert shown.tags == plain.tags
    assert text in "".join(shown.texts)


def test_nothing_is_loaded_and_only_the_own_script_may_run(tmp_path):
    found = mistakes((EVIL, EVIL + "2"), lambda _: {"text": EVIL}, np.array([1]), np.array([2.0]), np.array([0]))
    lines = [{"step": 1, **TRAINING, "eval_" + EVIL: 0.5, "eval_loss": 1.0}]
    text = page.page(write_run(tmp_path, lines, found | STEP, f"  data  {EVIL}\n", run_name=EVIL))
    shown = Texts(text)
    assert text.count("<script") == shown.tags.count("script") == 1
    assert "img" not in shown.tags
    assert not shown.links
    assert "default-src 'none'" in text
    assert "http" not in re.sub("http-equiv", "", text)
    assert EVIL in shown.texts


def test_the_page_has_the_figures_of_the_files(tmp_path):
    lines = [
        {"step": 10, **TRAINING, "grad_norm": "NaN", "step_seconds": 0.5, "forward_backward": 0.75, "processes": 2},
        {"step": 10, "eval_loss": 0.5, "eval_accuracy": 0.75},
        {"step": 10, "train_runtime": 5.0},
    ]
    found = mistakes(("cat", "dog"), lambda _: {"text": "bark"}, np.array([0, 1]), np.array([3.0, 0]), np.array([1, 1]))
    card = "  processes      2, DDP over gloo\n  learning rate  0.1 at its peak\n"
    text = page.page(write_run(tmp_path, lines, found | STEP, card))
    everything = " ".join(" ".join(Texts(text).texts).split())
    for expected in (
        *("finished: 10 steps in 5.0 s", "5 % for the right class"),
        *("1 of 2 are wrong", "2, DDP over gloo", "learning rate", "0.1 at its peak", "bark"),
        *("compute 75 % 3.8 s", "0.432", "0.75"),
    ):
        assert expected in everything, expected
    assert everything.count("cat") >= 4


def test_a_run_that_goes_on_and_one_without_any_figure_have_a_page(tmp_path):
    assert "0 steps so far; the run has not finished" in page.page(write_run(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    text = page.page(tmp_path)
    assert "has not logged anything yet" in text
    assert "<svg" not in text


def test_the_command_trains_again_with_the_same_settings(tmp_path):
    recipe, folder = runs.load_recipe("nlp"), tmp_path / "a run"
    folder.mkdir()
    given = ["--seed", "7", "--mirror_checkpoints", "s3://b/x", "--expect_processes", "2", "--push_to_hub"]
    options.save(options.parse(recipe.Config, [*given, "--output_dir", str(folder)]), folder / "config.yaml")
    program, script, *flags = shlex.split(page.command(folder))
    assert (program, script) == ("python", "recipes/nlp.py")
    again = options.parse(recipe.Config, flags)
    assert (again.seed, again.mirror_checkpoints, again.expect_processes, again.push_to_hub) == (7, None, None, False)
    assert not options.differences(options.load(folder / "config.yaml"), again)
    assert again.output_dir == str(tmp_path / "a run-again")


def test_spikes_and_the_last_value_of_a_long_run_stay(tmp_path):
    steps = np.arange(100_000)
    values = np.sin(steps / 1e4)
    values[54_321] = 9.0
    figure = page.figure_of(Panel("Loss", {"training": (steps.tolist(), values.tolist())}), 100_000)
    said = [text for _, _, text in figure["points"]]
    assert len(said) <= page.MOST_POINTS
    assert "step 54,321: training 9" in said
    assert said[-1].startswith("step 99,999: ")


def test_a_thousand_classes_and_large_pictures_give_a_small_page(tmp_path):
    rng = np.random.default_rng(0)
    picture = "data:image/png;base64," + "A" * 37_000  # noise of 96 x 96 pixels
    names = [f"a class with the number {i} and a long name" for i in range(1000)]
    true, predicted = rng.integers(0, 1000, (2, 50_000))
    found = mistakes(names, lambda _: {"picture": picture}, predicted, rng.random(50_000), true)
    lines = [{"step": step, **TRAINING} for step in range(2000)]
    text = page.page(write_run(tmp_path, lines, found | STEP))
    assert len(text) < 2_000_000
    assert text.count("<img ") == 16


def test_only_a_run_from_the_start_forgets_the_mistakes_of_an_earlier_one(tmp_path):
    write_run(tmp_path, found={"step": 3})
    config, accelerator = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(is_main_process=True)
    for resumed in (True, False):
        run = SimpleNamespace(config=config, accelerator=accelerator, launch_card="  data  texts", checkpoint=resumed)
        Report().begun(run)
        assert (tmp_path / "mistakes.json").exists() == resumed
    assert page.card_rows(tmp_path / "launch_card.txt") == [("data", "texts")]


def test_the_end_of_a_run_says_where_its_time_went_and_where_its_pictures_are(tmp_path, capsys):
    shares = {"step_seconds": 0.5, "forward_backward": 0.75, "communication": 0.2}
    write_run(tmp_path, [{"step": 10} | TRAINING | shares, {"step": 10, "train_runtime": 5.0}])
    config = SimpleNamespace(output_dir=str(tmp_path), gradient_compression="none")
    (tmp_path / "curves.png").mkdir()
    Report().ended(SimpleNamespace(config=config, accelerator=SimpleNamespace(is_fsdp2=False), finished=False))
    said = capsys.readouterr()
    assert said.out.startswith("  where 5.0 s went: 75 % compute, 1 % data, 20 % communication, 4 % outs")
    assert said.out.endswith(f"\n  {tmp_path / 'report.html'} shows the run in a browser\n")
    assert said.err.startswith("warning: curves.png was not written: IsADirectoryError")


def test_the_command_writes_the_page_or_names_the_problem(tmp_path):
    command, page = [sys.executable, "-m", "shared.report"], tmp_path / "report.html"
    assert runs.run([*command, write_run(tmp_path)]).stdout == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")
    page.unlink()
    page.mkdir()
    for folder, said in ((tmp_path / "missing", "has no config.yaml"), (tmp_path, "Is a directory")):
        done = runs.run([*command, folder])
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr
