"""What tracking promises: metrics.jsonl is the record, a tracker never ends a training, no key lands in a file."""

import importlib.util
import io
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UserError
from shared.monitoring import tracking
from shared.monitoring.curves import draw_curves, find_panels, short_power
from shared.monitoring.tracking import Tracker, cut_metrics, flat, read_metrics, require_trackers, wandb_mode

TRAINING = {
    "loss": 0.43211,
    "learning_rate": 1.2e-4,
    "grad_norm": 1.5,
    "samples": "00ff",
    "samples_per_second": 512.2,
    "tokens_per_second": 5643.0,
    "data_wait": 0.01,
}
values = st.one_of(st.floats(), st.integers(), st.text(max_size=8).filter(lambda text: text not in tracking.NOT_FINITE))


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.trackers.clear()


@pytest.fixture
def start(accelerator, tmp_path, monkeypatch):
    """Start a Tracker in `tmp_path`, as a recipe does. The picture, which takes a second, has tests of its own."""
    monkeypatch.setattr(tracking, "draw_curves", lambda *_: None)
    started = []

    def start(**changes):
        arguments = {"report_to": ["none"], "project": "p", "run_name": None, "run_id": None, "step": 0}
        config = {"seed": 1, "nested": {"rate": 1e-4, "none": None}}
        cut_metrics(tmp_path / "metrics.jsonl", changes.get("step", 0))
        tracker = Tracker(accelerator, tmp_path, total_steps=1000, config=config, **(arguments | changes))
        started.append(tracker)
        return tracker

    yield start
    for tracker in started:
        tracker.close()


def strict_json(text):
    """Parse as every other language does: NaN and Infinity are no JSON."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


# metrics.jsonl


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: key != "step"), values, max_size=5), st.integers(0))
def test_every_value_comes_back_and_every_line_is_valid_json(tmp_path_factory, line, step):
    folder = tmp_path_factory.mktemp("run")
    tracker = Tracker(
        Accelerator(cpu=True),
        folder,
        report_to=["none"],
        project="p",
        run_name=None,
        run_id=None,
        config={},
        step=0,
        total_steps=1,
    )
    tracker.log(step, line)
    (text,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert next(iter(strict_json(text))) == "step"
    (back,) = read_metrics(folder / "metrics.jsonl")
    assert back.keys() == {"step", *line}
    for key, value in line.items():
        same = back[key] == value or (math.isnan(value) and math.isnan(back[key]))
        assert same
        assert type(back[key]) is type(value)


def test_a_line_is_on_disk_when_log_returns_and_the_summary_is_the_last(start, tmp_path):
    tracker = start()
    tracker.log(10, TRAINING)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 10, **TRAINING}]
    tracker.log(10, {"eval_accuracy": 0.5})
    tracker.finish(10, {"train_runtime": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[1:] == [
        {"step": 10, "eval_accuracy": 0.5},
        {"step": 10, "train_runtime": 3.0},
    ]


def test_a_resumed_run_leaves_the_file_of_one_that_was_never_interrupted(start, tmp_path):
    def train(tracker, first, last):
        for step in range(first + 1, last + 1):
            tracker.log(step, {"loss": 1 / step, "grad_norm": math.inf if step == 3 else 1.0})

    whole = start()
    train(whole, 0, 9)
    whole.finish(9, {"train_runtime": 1.0})
    expected = (tmp_path / "metrics.jsonl").read_bytes()

    train(start(), 0, 7)  # killed after step 7, while it wrote
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    resumed = start(step=5)
    train(resumed, 5, 9)
    resumed.finish(9, {"train_runtime": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == expected

    more = start(step=9)  # a finished run goes on: its summary is no longer the last line
    assert all("train_runtime" not in line for line in read_metrics(tmp_path / "metrics.jsonl"))
    more.log(10, {"loss": 0.1})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 10), 10]


def test_a_new_run_begins_with_an_empty_file(start, tmp_path):
    start().log(0, {"eval_accuracy": 0.1})
    start()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 20), st.integers(1, 40))
def test_a_cut_keeps_exactly_the_whole_lines_up_to_the_step(tmp_path_factory, steps, step, torn):
    file = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    texts = [json.dumps({"step": one, "loss": 1.5, "order": number}) for number, one in enumerate(steps)]
    last = json.dumps({"step": 1, "loss": 2.5})
    file.write_text("".join(text + "\n" for text in texts) + last[: min(torn, len(last) - 1)])
    cut_metrics(file, step)
    assert file.read_text() == "".join(text + "\n" for text, one in zip(texts, steps, strict=True) if one <= step)


def test_a_crash_during_the_cut_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def crash(*_):
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        cut_metrics(file, 1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("garbage", ["hello", "[1]", "{}", '{"step": "x"}', '{"step": 1, "l'])
def test_a_file_that_is_no_record_of_a_run_is_refused_and_kept(start, tmp_path, garbage):
    text = f'{{"step": 1}}\n{garbage}\n{{"step": 2}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object with a step"):
        start(step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


# The screen


def test_without_a_terminal_every_log_call_is_one_line(start, capsys):
    tracker = start()
    tracker.log(120, TRAINING)
    tracker.log(120, {"eval_accuracy": 0.91234, "eval_loss": 0.25})
    tracker.finish(120, {"train_runtime": 3.0})
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "step 120/1000  loss 0.4321  lr 1.20e-4  512 samples/s",
        "step 120/1000  eval_accuracy 0.9123  eval_loss 0.25",
    ]
    assert printed.err == ""


def test_in_a_terminal_the_bar_shows_training_and_scores_get_a_line(start, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    tracker = start(step=100)
    tracker.bar.update()
    assert tracker.bar.n == 101
    tracker.log(120, TRAINING)
    tracker.log(120, {"eval_accuracy": 0.91234})
    assert tracker.bar.n == 120
    tracker.close()
    assert "120/1000" in terminal.getvalue()
    assert "loss 0.4321  lr 1.20e-4  512 samples/s" in terminal.getvalue()
    assert capsys.readouterr().out == "step 120/1000  eval_accuracy 0.9123\n"


# Trackers


class Recorder(GeneralTracker):
    """A tracker that keeps what it gets, and breaks down at the step it is told."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, breaks_at=math.inf):
        super().__init__()
        self.breaks_at, self.seen, self.finished = breaks_at, [], 0

    @property
    def tracker(self):
        return self

    def log(self, values, step=None, **_):
        if step >= self.breaks_at:
            raise ConnectionError("no route to host\nand a paragraph about it")
        self.seen.append((step, values))

    def finish(self):
        self.finished += 1


def test_a_tracker_gets_the_numbers_and_is_ended_once(start, accelerator):
    tracker, recorder = start(), Recorder()
    accelerator.trackers.append(recorder)
    tracker.log(1, {"loss": 0.5, "samples": "00ff"})
    tracker.finish(1, {"train_runtime": 3.0})
    accelerator.end_training()
    assert recorder.seen == [(1, {"loss": 0.5}), (1, {"train_runtime": 3.0})]
    assert recorder.finished == 1


def test_a_tracker_that_fails_is_dropped_with_one_warning(start, accelerator, tmp_path, capsys):
    tracker, recorder = start(), Recorder(breaks_at=2)
    accelerator.trackers.append(recorder)
    for step in range(1, 5):
        tracker.log(step, {"loss": 0.5})
    tracker.finish(4, {"train_runtime": 3.0})
    assert [step for step, _ in recorder.seen] == [1]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert capsys.readouterr().err.splitlines() == [
        "warning: recorder was dropped: ConnectionError: no route to host; metrics.jsonl has everything"
    ]


def test_an_id_is_kept_or_new_whatever_the_seed(start):
    random.seed(0)
    first = start().run_id
    random.seed(0)
    second = start().run_id
    assert first != second
    assert re.fullmatch("[0-9a-f]{8}", first)
    assert start(run_id="abcd1234").run_id == "abcd1234"


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"--report_to {name}: .*pip install {name}"):
        require_trackers([name])


def test_a_folder_named_like_a_tracker_is_not_the_tracker(tmp_path, monkeypatch):
    (tmp_path / "tracker_of_tomorrow").mkdir()  # as wandb/ lies beside the script after its first run
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "TRACKERS", ("tracker_of_tomorrow",))
    with pytest.raises(UserError, match="not installed"):
        require_trackers(["tracker_of_tomorrow"])


def test_an_unknown_tracker_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="--report_to mlflow is unknown: use none, wandb, tensorboard, trackio"):
        require_trackers(["mlflow"])


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_tensorboard_and_trackio_work_where_they_are_installed_and_are_refused_where_not(
    name, start, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if importlib.util.find_spec(name) is None:
        with pytest.raises(UserError, match=f"pip install {name}"):
            require_trackers([name])
        return
    for step in (0, 2):  # the second is a resumed run
        tracker = start(report_to=[name], step=step, run_id="abcd1234")
        assert tracker.state.startswith(name)
        tracker.log(step + 1, TRAINING)
        tracker.finish(step + 1, {"train_runtime": 3.0})
    assert any(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [
            (n, pytest.approx(TRAINING["loss"])) for n in (1, 3)
        ]


def test_several_trackers_get_the_numbers_and_one_that_does_not_start_stops_no_other(
    start, accelerator, monkeypatch, capsys
):
    recorders = {name: Recorder() for name in tracking.TRACKERS}

    def starts(name):
        def begin(accelerator, *_):
            accelerator.trackers = [recorders[name]]  # as Accelerate's init_trackers, which begins anew
            if name == "trackio":
                raise OSError("no server")
            return f"{name} (here)"

        return begin

    for name in recorders:
        monkeypatch.setattr(tracking, f"start_{name}", starts(name))
    tracker = start(report_to=["wandb", "trackio", "tensorboard"])
    assert tracker.state == "wandb (here); none (trackio did not start: OSError: no server); tensorboard (here)"
    assert "--report_to trackio did not start: OSError: no server" in capsys.readouterr().err
    tracker.log(1, {"loss": 0.5})
    tracker.finish(1, {"train_runtime": 3.0})
    seen = [(1, {"loss": 0.5}), (1, {"train_runtime": 3.0})]
    assert recorders["tensorboard"].seen == seen
    assert [values for _, values in recorders["wandb"].seen] == [values for _, values in seen]
    assert [recorder.finished for recorder in recorders.values()] == [1, 1, 0]


def test_settings_become_flat_for_tensorboard():
    assert flat({"a": {"b": {"c": 1}}, "d": None, "e": [1, 2], "f": True}) == {
        "a/b/c": 1,
        "d": "None",
        "e": "[1, 2]",
        "f": True,
    }


# wandb


@pytest.fixture
def clean_wandb(tmp_path, monkeypatch):
    """No key, no settings, no terminal, nothing left in the process of an earlier wandb session."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(home))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    wandb.teardown()
    yield wandb
    wandb.teardown()


def test_wandb_offline_leaves_its_files_in_the_run_folder_and_no_key_in_any(
    start, tmp_path, monkeypatch, clean_wandb, accelerator
):
    key = "5ec2e7" * 7
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = start(report_to=["wandb"])
    parts = f"{tmp_path}/wandb/offline-run-*-{tracker.run_id}"
    assert tracker.state == f"wandb (offline: WANDB_MODE=offline; sync later with `wandb sync {parts}`)"
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert run.id == tracker.run_id
    assert run.config["nested"] == {"rate": 1e-4, "none": None}
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{tracker.run_id}")
    for step in (5, 7, 6):  # wandb's own counter would drop 6
        tracker.log(step, TRAINING | {"loss": 1 / step})
    assert (run.summary["step"], run.summary["loss"]) == (6, 1 / 6)
    tracker.finish(7, {"train_runtime": 3.0})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert folder / f"run-{tracker.run_id}.wandb" in files
    written, deadline = folder / f"run-{tracker.run_id}.wandb", time.monotonic() + 20
    while b"learning_rate" not in written.read_bytes():  # so a key would be seen, too; wandb's other process writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def test_wandb_without_a_network_is_offline_at_once_key_or_not(clean_wandb, monkeypatch):
    with socket.socket() as free:  # a port at which nobody listens
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        assert wandb_mode() == ("offline", f"there is no network to 127.0.0.1:{port} (Connection refused)")


def test_wandb_without_a_key_and_without_a_terminal_is_offline_and_says_why(clean_wandb, monkeypatch):
    monkeypatch.setattr(tracking, "unreachable", lambda _: None)
    assert wandb_mode() == ("offline", "no API key and no terminal")


def test_wandb_with_a_key_is_online(clean_wandb, monkeypatch):
    monkeypatch.setattr(tracking, "unreachable", lambda _: None)
    (Path(os.environ["HOME"])).mkdir()
    host = clean_wandb.setup().settings.base_url.removeprefix("https://")
    Path(os.environ["NETRC"]).write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    monkeypatch.setattr("wandb.sdk.wandb_login._print_logged_in_message", lambda *_, **__: None)  # asks the network
    assert wandb_mode() == (None, "")


def test_wandb_that_cannot_start_is_told_on_every_process_and_ends_nothing(tmp_path):
    """Two processes; wandb.init raises, on the main one only."""
    (tmp_path / "wandb.py").write_text(
        "def Settings(**_): ...\ndef init(**_): raise RuntimeError('401 unauthorized')\n__version__ = '0.31.0'\n"
    )
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from accelerate import Accelerator\n"
        "from shared.monitoring.tracking import Tracker\n"
        "accelerator = Accelerator(cpu=True)\n"
        "assert accelerator.num_processes == 2\n"
        "tracker = Tracker(accelerator, Path(sys.argv[1]), report_to=['wandb'], project='p', run_name=None,\n"
        "    run_id=None, config={}, step=0, total_steps=1)\n"
        "tracker.log(1, {'loss': 1.0})\n"
        "tracker.finish(1, {'train_runtime': 1.0})\n"
        "print(tracker.run_id, tracker.state)\n"
        "accelerator.end_training()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = str(Path(tracking.__file__).parents[2])
    environment = os.environ | {
        "WANDB_MODE": "online",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / "run.py", tmp_path],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    said = [out.splitlines()[-1] for out, _ in outputs]
    assert said[0] == said[1]
    assert said[0].endswith(" none (wandb did not start: RuntimeError: 401 unauthorized)")
    warnings = [err.count("warning: --report_to wandb did not start: RuntimeError: 401") for _, err in outputs]
    assert warnings == [1, 0]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]


# The picture


def test_the_run_ends_with_a_picture(start, tmp_path, monkeypatch):
    tracker = start()
    monkeypatch.setattr(tracking, "draw_curves", draw_curves)
    for step in range(1, 4):
        tracker.log(step, TRAINING)
    tracker.finish(3, {"train_runtime": 3.0})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_end_says_where_the_time_went(start, capsys):
    tracker = start()
    tracker.log(10, TRAINING | {"step_seconds": 0.5, "forward_backward": 0.75, "communication": 0.2})
    tracker.finish(10, {"train_runtime": 5.0})
    assert "where 5.0 s went: 75 % compute, 1 % data, 20 % communication, 4 % rest" in capsys.readouterr().out


def test_a_process_that_is_behind_is_named_in_the_line():
    values = TRAINING | {"slowest_process": 3.0, "slowest_process_behind": 0.14}
    assert tracking.readable(values).endswith("512 samples/s  process 3 is 14 % behind")


def test_a_picture_that_cannot_be_drawn_ends_nothing(start, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(tracking, "draw_curves", fail)
    tracker = start()
    tracker.finish(3, {"train_runtime": 3.0})
    assert "warning: curves.png was not drawn: ImportError: No module named" in capsys.readouterr().err


def test_each_panel_shows_what_belongs_there():
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
def test_learning_rates_are_short(rate, text):
    assert short_power(rate) == text
