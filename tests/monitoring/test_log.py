"""metrics.jsonl is the record of a run."""

import io
import json
import math
import sys
from pathlib import Path
from unittest import mock

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from runs import refusal
from training_line import TRAINING

from shared.monitoring.log import NOT_FINITE, Log, cut_metrics, read_metrics, readable

values = st.one_of(st.floats(), st.integers(), st.text(max_size=8).filter(lambda text: text not in NOT_FINITE))


def strict_json(text):
    """Parse JSON by its standard, which has no NaN and no Infinity."""
    return json.loads(text, parse_constant=mock.Mock(side_effect=ValueError))


@pytest.fixture
def start(accelerator, tmp_path):
    """Begin the log of a run in `tmp_path` at a step, as a run does."""

    def start(step=0):
        cut_metrics(tmp_path / "metrics.jsonl", step)
        return Log(accelerator, tmp_path, step, 1000)

    return start


# metrics.jsonl


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: key != "step"), values, max_size=5), st.integers(0))
def test_every_value_is_on_disk_at_once_as_valid_json_and_is_read_back_unchanged(tmp_path_factory, line, step):
    folder = tmp_path_factory.mktemp("run")
    log = Log(Accelerator(cpu=True), folder, 0, 1)
    log.write(step, line)
    (text,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert next(iter(strict_json(text))) == "step"
    (back,) = read_metrics(folder / "metrics.jsonl")
    assert back.keys() == {"step", *line}
    for key, value in line.items():
        same = back[key] == value or (math.isnan(value) and math.isnan(back[key]))
        assert same
        assert type(back[key]) is type(value)
    cut_metrics(folder / "metrics.jsonl", step)
    assert (folder / "metrics.jsonl").read_text() == (text + "\n" if step and "train_runtime" not in line else "")


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(0, 20), st.integers(1, 40), st.booleans())
def test_a_cut_keeps_exactly_the_complete_lines_up_to_the_step(tmp_path_factory, steps, step, torn, owed):
    file = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    kinds = "loss", "eval_loss"
    texts = [json.dumps({"step": one, kinds[number % 2]: 1.5, "order": number}) for number, one in enumerate(steps)]
    summary = json.dumps({"step": 1, "train_runtime": 3.0})  # of a finished run, which goes on
    last = json.dumps({"step": 1, "loss": 2.5})
    file.write_text("".join(text + "\n" for text in (*texts, summary)) + last[: min(torn, len(last) - 1)])
    cut_metrics(file, step, evaluation_owed=owed)
    last = [step, step - owed]  # of each kind; an evaluation that is owed is made again
    kept = [text for number, text in enumerate(texts) if steps[number] <= last[number % 2]]
    assert file.read_text() == "".join(text + "\n" for text in kept)


def test_a_crash_during_the_cut_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cut_metrics(file, 1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("garbage", ["hello", "[1]", "{}", '{"step": "x"}', '{"step": 1, "l'])
def test_a_file_that_is_not_a_record_of_a_run_is_refused_and_kept(start, tmp_path, garbage):
    text = f'{{"step": 1}}\n{garbage}\n{{"step": 2}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert "metrics.jsonl, line 2: not a JSON object with a step" in refusal(start, step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


# The screen


def test_without_a_terminal_every_log_call_is_one_line(start, capsys):
    log = start()
    log.write(120, TRAINING)
    log.write(120, {"eval_accuracy": 0.91234, "eval_loss": 0.25})
    log.write(120, {"train_runtime": 3.0})
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "step 120/1000  loss 0.4321  lr 1.20e-4  512 samples/s",
        "step 120/1000  eval_accuracy 0.9123  eval_loss 0.25",
    ]
    assert printed.err == ""


def test_in_a_terminal_the_bar_shows_training_figures_and_each_score_gets_a_line(start, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    log = start(step=100)
    log.bar.update()
    assert log.bar.n == 101
    log.write(120, TRAINING)
    log.write(120, {"eval_accuracy": 0.91234})
    assert log.bar.n == 120
    log.bar.close()
    assert "120/1000" in terminal.getvalue()
    assert "loss 0.4321  lr 1.20e-4  512 samples/s" in terminal.getvalue()
    assert capsys.readouterr().out == "step 120/1000  eval_accuracy 0.9123\n"


def test_a_process_that_is_behind_is_named_in_the_line():
    values = TRAINING | {"slowest_process": 3.0, "slowest_process_behind": 0.14}
    assert readable(values).endswith("512 samples/s  process 3 is 14 % behind")
