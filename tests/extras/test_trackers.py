"""Trackers receive the numbers, and one that fails does not end the training; no API key is written to a file."""

import contextlib
import importlib.util
import math
import os
import random
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest
import runs
from accelerate.tracking import GeneralTracker
from training_line import TRAINING

from shared.extras import trackers
from shared.extras.trackers import Trackers, require_trackers, wandb_mode
from shared.monitoring.log import read_metrics
from shared.options.data_options import ExtraOptions


class Recorder(GeneralTracker):
    """A tracker that keeps the values it receives and raises an error from step `breaks_at` on."""

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


class LoggingRun(SimpleNamespace):
    """A stand-in for a `TrainingRun` that has begun at `step`, and only logs."""

    def __init__(self, accelerator, folder, step=0, run_id=None, **settings):
        config, progress = ExtraOptions(output_dir=str(folder), **settings), SimpleNamespace(run_id=run_id, step=step)
        closing = contextlib.ExitStack()
        super().__init__(accelerator=accelerator, config=config, progress=progress, card={}, closing=closing)
        self.trackers = Trackers()
        self.trackers.loaded(self)
        self.log, self.close = self.trackers.logged, self.trackers.closed

    def finish(self, step, summary):
        self.log(step, summary)
        self.close()


@pytest.fixture
def start(accelerator, tmp_path):
    """Start a run in the folder "a run"."""
    folder = tmp_path / "a run"
    with contextlib.ExitStack() as ends:
        yield lambda **given: ends.enter_context(contextlib.closing(LoggingRun(accelerator, folder, **given)))


def test_a_run_id_is_random_for_any_seed_unless_it_is_given(start):
    first, second = ((random.seed(0), start().progress.run_id)[1] for _ in range(2))
    assert first != second
    assert start(run_id="abcd1234").progress.run_id == "abcd1234"


def test_a_tracker_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()  # like the folder wandb/ beside a script after its first run
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("folder", "absent"):
        why = f"--report_to {name}: the package is not installed; run `pip install {name}`"
        assert runs.refusal(require_trackers, [name]) == why


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_tensorboard_and_trackio_work_if_installed_and_are_refused_otherwise(name, start, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "a run/trackio"))
    if importlib.util.find_spec(name) is None:
        assert f"pip install {name}" in runs.refusal(require_trackers, [name])
        return
    for step in (0, 2):  # the second is a resumed run
        tracker = start(report_to=name, step=step, run_id="abcd1234")
        assert tracker.card["tracker"].startswith(name)
        tracker.log(step + 1, TRAINING)
        tracker.finish(step + 1, {"train_runtime": 3.0})
    assert any(path.stat().st_size for path in (tmp_path / "a run" / name).rglob("*") if path.is_file())
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "a run" / name)).Reload()
        losses = [(e.step, e.value) for e in events.Scalars("loss")]
        assert tracker.card["tracker"] == f"tensorboard (`tensorboard --logdir '{tmp_path}/a run'`)"
        assert losses == [(n, pytest.approx(TRAINING["loss"])) for n in (1, 3)]


def test_several_trackers_get_the_numbers_even_if_one_of_them_does_not_start(start, accelerator, monkeypatch, capsys):
    recorders = {name: Recorder() for name in trackers.STARTERS}

    def begin(name, *_):
        if name == "trackio":
            raise OSError("no server")
        return recorders[name], f"{name} (here)"

    for name in recorders:
        monkeypatch.setitem(trackers.STARTERS, name, partial(begin, name))
    tracker = start(report_to=["wandb", "trackio", "none", "tensorboard", "wandb"])
    assert tracker.card["tracker"] == "wandb (here); tensorboard (here)"
    assert "--report_to trackio did not start: OSError: no server" in capsys.readouterr().err
    tracker.log(1, {"loss": 0.5, "samples": "00ff"})
    tracker.finish(1, {"train_runtime": 3.0})
    accelerator.end_training()  # finishes none a second time
    seen = [(1, {"loss": 0.5}), (1, {"train_runtime": 3.0})]
    assert recorders["tensorboard"].seen == seen
    assert [values for _, values in recorders["wandb"].seen] == [values for _, values in seen]
    assert [recorder.finished for recorder in recorders.values()] == [1, 1, 0]


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_an_error_that_ends_the_run_closes_the_others(
    texts, tmp_path, monkeypatch, capsys
):
    """They would lose what they have not written, because the process ends at once."""
    failing, recorder, codes = Recorder(breaks_at=2), Recorder(), []
    wandb = SimpleNamespace(name="wandb", log=lambda _: None, run=SimpleNamespace(finish=codes.append))
    monkeypatch.setattr(trackers, "require_trackers", lambda _: None)
    for name, tracker in (("trackio", failing), ("tensorboard", recorder), ("wandb", wandb)):
        monkeypatch.setitem(trackers.STARTERS, name, lambda *_, it=tracker: (it, ""))
    flags = [*runs.TINY, *texts, "--report_to", *trackers.STARTERS, "--learning_rate", 1e30, "--max_grad_norm", 0]
    said = runs.refusal(runs.train, "nlp", tmp_path / "run", *flags, "--max_train_steps", 20, "--logging_steps", 1)
    assert "steps in a row were not finite" in said
    assert (recorder.finished, codes) == (1, [1])
    assert [step for step, _ in failing.seen] == [1]
    assert len(recorder.seen) == len(read_metrics(tmp_path / "run/metrics.jsonl")) == 12
    assert [line for line in capsys.readouterr().err.splitlines() if "warning" in line or "metrics" in line] == [
        "warning: recorder failed and was dropped: ConnectionError: no route to host; metrics.jsonl has all values"
    ]


# wandb


@pytest.fixture
def clean_wandb(tmp_path, monkeypatch):
    """wandb without a key, settings and the state of an earlier session in this process."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(home))
    wandb.teardown()
    yield wandb
    wandb.teardown()


def test_wandb_offline_writes_its_files_into_the_run_folder_and_the_api_key_into_none(
    start, tmp_path, monkeypatch, clean_wandb, accelerator
):
    key = "5ec2e7" * 7
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = start(report_to="wandb")
    parts = f"'{tmp_path}/a run'/wandb/offline-run-*-{tracker.progress.run_id}"
    assert tracker.card["tracker"].endswith(f"mode is set to offline; sync later with `wandb sync {parts}`)")
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert run.id == tracker.progress.run_id
    assert (run.config["learning_rate"], run.config["max_train_steps"]) == (5e-5, None)
    (folder,) = (tmp_path / "a run/wandb").glob(f"offline-run-*-{tracker.progress.run_id}")
    for step in (5, 7, 6):  # wandb's own counter would drop 6
        tracker.log(step, TRAINING | {"loss": 1 / step})
    assert (run.summary["step"], run.summary["loss"]) == (6, 1 / 6)
    tracker.finish(7, {"train_runtime": 3.0})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert folder / f"run-{tracker.progress.run_id}.wandb" in files
    written, deadline = folder / f"run-{tracker.progress.run_id}.wandb", time.monotonic() + 20
    while b"learning_rate" not in written.read_bytes():  # another process of wandb writes it, as it would a key
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def test_wandb_is_online_with_a_key_and_a_network_only(clean_wandb, monkeypatch):
    with socket.socket() as free:  # a port without a server
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        assert wandb_mode() == ("offline", f"there is no network to 127.0.0.1:{port} (Connection refused)")
    monkeypatch.setattr(trackers, "unreachable", lambda _: None)
    assert wandb_mode() == ("online", "")
    clean_wandb.teardown()
    monkeypatch.delenv("WANDB_API_KEY")
    assert wandb_mode() == ("offline", "no API key: run `wandb login`")
