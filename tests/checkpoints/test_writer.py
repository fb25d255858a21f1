"""The writer process writes complete checkpoints or none, keeps other files, ignores signals, ends with its parent."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from shared.checkpoints import writer as checkpoint_writer
from shared.checkpoints.files import Image
from shared.checkpoints.writer import Job, Writer, complete_in, partials_in, rotate, write


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def job(folder, step=3, **values):
    return Job(folder / f"step_{step:08d}", images={}, contents={"state.json": b"{}"}, **values)


@pytest.fixture
def zeros():
    """An image of 128 MB that takes no memory, because it is sparse, and takes a while to write."""
    descriptor = os.memfd_create("zeros")
    os.truncate(descriptor, 1 << 27)
    yield Image(descriptor, 1 << 27)
    os.close(descriptor)


@pytest.fixture
def writer(zeros):
    writer = Writer({"big": zeros})
    yield writer
    with contextlib.suppress(ProcessLookupError):
        writer.process.send_signal(signal.SIGCONT)
    writer.process.kill()
    writer.end()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_has_all_its_files_and_a_manifest_of_them(writer, zeros, tmp_path):
    asked = Job(tmp_path / "step_00000003", {"big": zeros}, {"small": b"abc", "empty": b""})
    writer.start(asked)
    assert writer.reply(wait=True) == ""
    assert names(tmp_path) == {"step_00000003"}
    assert names(asked.final) == {"big", "small", "empty", "manifest.json"}
    manifest = json.loads((asked.final / "manifest.json").read_text())
    assert {name: line["bytes"] for name, line in manifest.items()} == {"big": 1 << 27, "small": 3, "empty": 0}
    assert manifest["small"]["xxh3_128"] == "06b05ab6733a618578af5f94892f3950"
    assert asked.bytes() == (1 << 27) + 3


def test_a_writer_that_is_killed_while_it_writes_leaves_no_checkpoint_and_is_reported(writer, zeros, tmp_path):
    asked = Job(tmp_path / "step_00000003", {"big": zeros}, {})
    writer.start(asked)
    wait_until(asked.partial.exists)
    writer.process.send_signal(signal.SIGSTOP)
    assert not asked.final.exists()
    assert writer.reply(wait=False) is None
    writer.process.kill()
    assert writer.reply(wait=True) == "the process that writes it ended with exit code -9"
    assert complete_in(tmp_path) == {}
    assert partials_in(tmp_path) == [asked.partial]


def test_the_writer_ignores_signals_that_are_meant_for_the_training_process(zeros, tmp_path):
    writer = Writer({"big": zeros})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        writer.process.send_signal(number)  # while it starts
    writer.start(Job(tmp_path / "step_00000003", {"big": zeros}, {}))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        writer.process.send_signal(number)
    assert writer.reply(wait=True) == ""
    writer.end()
    assert writer.process.returncode == 0


PARENT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from shared.checkpoints.writer import Writer
print(Writer({}).process.pid, flush=True)
time.sleep(60)
"""


def test_the_writer_ends_with_its_parent_even_if_it_is_stopped_or_its_pipe_stays_open(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, runs.ROOT], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    pipe = os.open(f"/proc/{pid}/fd/0", os.O_WRONLY)  # kept open, because its end would end the writer, too
    wait_until(lambda: "SigBlk:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text())  # it has started
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text())
    os.close(pipe)
    parent.stdout.close()


def test_a_failure_names_the_needed_and_the_free_space_and_leaves_no_file(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(OSError, match=r"^not enough space; 0\.0 MB are needed, and in .* 0\.0 MB are free$"):
        write(job(tmp_path))
    monkeypatch.undo()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "commit", full)
    with pytest.raises(OSError, match=r"No space left on device; 0\.0 MB are needed, and in .* MB are free$"):
        write(job(tmp_path))
    with pytest.raises(OSError, match=r"No such file or directory.*the free space is unknown"):
        write(job(tmp_path / "lost mount/checkpoints"))
    assert names(tmp_path) == set()


def test_a_checkpoint_replaces_all_files_of_an_older_one_of_the_same_step(tmp_path):
    write(job(tmp_path))
    (tmp_path / "step_00000003/left over").write_text("of a damaged one")
    write(job(tmp_path))
    assert names(tmp_path) == {"step_00000003"}
    assert names(tmp_path / "step_00000003") == {"state.json", "manifest.json"}


@pytest.mark.parametrize(
    ("newest", "keep", "best", "needed_from", "kept"),
    [
        (12, 2, None, None, {9, 12}),
        (12, 1, 3, None, {3, 12}),
        (12, None, None, None, {3, 6, 9, 12}),
        (12, 9, None, None, {3, 6, 9, 12}),
        (12, 1, None, 6, {6, 9, 12}),
        (12, 1, None, -1, {3, 6, 9, 12}),
        (9, 1, None, None, {9, 12}),  # the run resumed from a checkpoint before the newest
    ],
)
def test_rotation_keeps_the_newest_the_best_and_those_that_a_machine_may_need(
    tmp_path, newest, keep, best, needed_from, kept
):
    for step in (3, 6, 9, 12):
        write(job(tmp_path, step))
    rotate(tmp_path / f"step_{newest:08d}", keep, best, needed_from)
    assert set(complete_in(tmp_path)) == kept
    assert len(names(tmp_path)) == len(kept)


def test_other_files_in_the_folder_are_not_removed_and_links_are_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    write(job(folder, 1))
    (folder / "step_00000001").rename(elsewhere)
    strangers = [
        "best",
        ".partial",
        "step_final",
        "step_7",
        "step_00000002.partial",
        "x.partial-0123abcd",
        "step_00000005",
    ]
    for name in strangers:
        (folder / name).mkdir()
    for name in ("best", "step_final", "step_7"):
        (folder / name / "manifest.json").write_text("{}")
    (folder / "step_00000004").symlink_to(elsewhere)
    (folder / "step_00000004.partial-0123abcd").symlink_to(elsewhere)
    (folder / "step_00000008").symlink_to("nowhere")
    (folder / "step_00000009").write_text("a file")
    before = names(folder)
    for step in (3, 6):
        write(job(folder, step, keep=1))
    assert set(complete_in(folder)) == {6}
    assert partials_in(folder) == []
    assert names(folder) == before | {"step_00000006"}
    assert names(elsewhere) == {"state.json", "manifest.json"}


def test_folders_that_cannot_be_read_or_removed_are_skipped(tmp_path, capfd):
    for step in (3, 6, 9):
        write(job(tmp_path, step))
    tmp_path.chmod(0o755)
    (tmp_path / "step_00000003").chmod(0)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    os.seteuid(65534)  # root may read everything
    try:
        with contextlib.suppress(PermissionError):
            list((tmp_path / "step_00000003").iterdir())
            pytest.skip("this user may read everything")
        assert set(complete_in(tmp_path)) == {6, 9}
        rotate(tmp_path / "step_00000009", keep=1, best=None)
    finally:
        os.seteuid(0)
    assert set(complete_in(tmp_path)) == {3, 6, 9}
    assert "step_00000006 cannot be removed ([Errno 13] Permission denied" in capfd.readouterr().err


def test_a_checkpoint_whose_removal_is_interrupted_does_not_count(tmp_path, monkeypatch):
    for step in (3, 6):
        write(job(tmp_path, step))
    monkeypatch.setattr(checkpoint_writer, "remove", lambda _: None)
    rotate(tmp_path / "step_00000006", keep=1, best=None)
    assert set(complete_in(tmp_path)) == {6}
    (left,) = partials_in(tmp_path)
    assert left.name.startswith("step_00000003.partial-")
