"""How one process handles signals: before there is anything to save, in training, and in its children."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import runs

from shared.processes import signals
from shared.processes.signals import EXIT_FAILED, EXIT_PREEMPTED, SAME_SIGNAL, Heard
from shared.run import resume


@pytest.fixture
def heard(tmp_path):
    heard = Heard()
    heard.output_dir = tmp_path / "run"
    return heard


def marker(folder):
    return json.loads((folder / signals.MARKER).read_text())


def test_a_dry_run_writes_no_marker(heard, tmp_path):
    heard.output_dir = None
    assert heard.hear(signal.SIGTERM, 100.0) == EXIT_PREEMPTED
    assert not list(tmp_path.iterdir())


def test_a_start_that_a_signal_ends_keeps_its_marker(heard, monkeypatch):
    monkeypatch.setattr(signals, "heard", heard)
    heard.hear(signal.SIGTERM, 100.0)
    threading.Thread(target=resume.clean_up, args=(heard.output_dir,), daemon=True).start()
    time.sleep(0.1)
    assert marker(heard.output_dir)["step"] is None


def test_in_training_a_signal_and_its_copies_are_noted_and_a_later_one_ends_the_process(heard):
    heard.something_to_save = True
    assert heard.hear(signal.SIGTERM, 100.0) is None
    assert heard.hear(signal.SIGTERM, 100.001) is None
    assert heard.hear(signal.SIGINT, 100.0 + SAME_SIGNAL) is None  # another signal, as a dying launcher sends
    assert heard.signal == signal.SIGTERM
    assert heard.hear(signal.SIGTERM, 100.1 + SAME_SIGNAL) == EXIT_PREEMPTED
    assert not heard.output_dir.exists(), "the loop writes the marker, after the checkpoint"


@pytest.mark.parametrize("something_to_save", [True, False])
def test_a_signal_to_end_the_others_after_a_failure_is_not_a_preemption(heard, something_to_save):
    heard.something_to_save, heard.peer_failed = something_to_save, lambda: True
    assert heard.hear(signal.SIGTERM, 100.0) == EXIT_FAILED
    assert not heard.output_dir.exists()


def test_a_run_ends_even_if_its_marker_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    signals.write_marker(tmp_path / "file", 3, {0: signal.SIGTERM})
    assert "PREEMPTED could not be written" in capsys.readouterr().err


# Real signals, in processes of their own

LISTENING = """
import ctypes, multiprocessing, os, signal, sys, time
from shared.processes import signals

signals.listen(sys.argv[1], os._exit, lambda: False)
mode = sys.argv[2]
if mode == "child":  # as a pool does with its workers
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    print(child.exitcode, flush=True)
    os._exit(0)
signals.heard.something_to_save = mode == "training"
print("ready", flush=True)
if mode == "blocked":  # in a call that does not return to Python, so that no handler runs
    while True:
        ctypes.CDLL(None).pause()
deadline = time.monotonic() + 60
while not signals.heard.signal and time.monotonic() < deadline:
    time.sleep(0.01)
print("noted", signal.Signals(signals.heard.signal).name, flush=True)
os._exit(7)
"""


@contextlib.contextmanager
def listening(folder, mode, *before, stdout=subprocess.PIPE):
    """A process that listens to signals, once it is ready; it is killed at the end."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", LISTENING, folder / "run", mode],
        cwd=runs.ROOT,
        stdout=stdout,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        if mode != "child" and stdout == subprocess.PIPE:
            assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        runs.end(process)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_each_signal_is_noted(tmp_path, number):
    with listening(tmp_path, "training") as process:
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == f"noted {number.name}\n"
        assert process.returncode == 7
        assert not (tmp_path / "run").exists()


def test_a_closed_terminal_has_no_effect_under_nohup(tmp_path):
    with listening(tmp_path, "training", "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "noted SIGTERM\n"


def test_printing_after_the_terminal_was_closed_is_not_an_error(tmp_path):
    ours, theirs = os.openpty()
    with listening(tmp_path, "training", stdout=theirs) as process:
        with os.fdopen(ours, "rb") as terminal:  # all of it: if closed earlier, printing this line would fail
            assert terminal.readline() == b"ready\r\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 7
    os.close(theirs)


def test_a_signal_ends_a_process_that_is_blocked(tmp_path):
    with listening(tmp_path, "blocked") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_PREEMPTED
        assert marker(tmp_path / "run")["signals"] == {"0": "SIGTERM"}


def test_a_child_that_gets_a_signal_ends_and_writes_no_marker(tmp_path):
    with listening(tmp_path, "child") as process:
        assert process.communicate(timeout=60)[0] == f"{-signal.SIGTERM}\n"
        assert not (tmp_path / "run").exists()


def work(pipe):
    signals.ignore_in_child()
    pipe.send(os.getpid())
    time.sleep(60)


def parent(pipe):
    """A process whose child ignores signals."""
    multiprocessing.get_context("fork").Process(target=work, args=(pipe,), daemon=True).start()
    time.sleep(60)


def test_a_loader_worker_ignores_signals_and_ends_with_its_parent():
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=parent, args=(there,))
    process.start()
    try:
        assert here.poll(30)
        worker = psutil.Process(here.recv())
        for number in signals.SIGNALS:
            worker.send_signal(number)
        time.sleep(0.1)
        assert worker.status() != psutil.STATUS_ZOMBIE
        process.kill()
        worker.wait(timeout=20)
    finally:
        process.kill()
        process.join()


BORN = """
import os, sys, time
from shared.processes import signals
while len(sys.argv) > 1 and os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
signals.die_with_launcher()
print("trains", flush=True)
"""


@pytest.mark.parametrize("name", signals.SET_BY_LAUNCHERS)
def test_a_process_ends_if_its_launcher_died_during_the_imports(name):
    if "python" in " ".join(psutil.Process(1).cmdline()):
        pytest.skip("orphans get a Python process as their parent here")
    command = f"{sys.executable} -c '{BORN}' $$ & exit"
    done = runs.run(["sh", "-c", command], timeout=60, **{name: "x"})
    assert (done.stdout, done.stderr) == ("", "the launcher of this process has ended: start again\n")


def test_a_process_trains_if_its_launcher_is_alive_or_it_has_none():
    for env in ({"TORCHELASTIC_RUN_ID": "x"}, {}):  # a shell in between, as in `torchrun --no-python wrapper.sh`
        command = ["sh", "-c", f"{sys.executable} -c '{BORN}'; true"]
        assert subprocess.check_output(command, cwd=runs.ROOT, env=os.environ | env, text=True) == "trains\n"
