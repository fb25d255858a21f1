"""One run at a time in an output folder; a lock of a dead process is none."""

import errno
import fcntl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs

from shared.config.options import Options
from shared.errors import UserError
from shared.processes import folder_lock
from shared.run import run_folder

HOLD = """
import sys, time
from shared.processes import folder_lock
folder_lock.acquire(sys.argv[1])
print("locked", flush=True)
sys.stdin.readline()
folder_lock.release_all()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        cwd=runs.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    runs.end(process)


def test_the_file_says_who_and_is_gone_in_the_end(tmp_path):
    folder_lock.acquire(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {folder_lock.os.getpid()} on ")
    assert folder_lock.try_to_lock(tmp_path / ".lock") is None
    folder_lock.release_all()
    assert not list(tmp_path.iterdir())
    folder_lock.release_all()  # once more does nothing


def test_a_holder_that_lives_is_waited_for_said_once_and_then_refused(holder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.5)
    with pytest.raises(UserError, match=f"--output_dir .* is in use by process {holder.pid} on .*another folder"):
        folder_lock.acquire(tmp_path)
    assert capsys.readouterr().out.count("is in use by process") == 1


def test_a_run_in_a_folder_in_use_is_refused_and_changes_nothing(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
    alone = SimpleNamespace(
        num_processes=1, is_main_process=True, is_local_main_process=True, mixed_precision="no", print=print
    )
    with pytest.raises(UserError, match="is in use by"):
        run_folder.open_run(alone, Options(output_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def open_and(end):
    """A recipe that opens its folder and ends in some way."""
    alone = SimpleNamespace(
        num_processes=1, is_main_process=True, is_local_main_process=True, mixed_precision="no", print=print
    )

    def main(config):
        with folder_lock.freed_after(config.output_dir):
            run_folder.open_run(alone, config)
            assert folder_lock.try_to_lock(Path(config.output_dir) / ".lock") is None
            return end()

    return main


def test_a_run_has_its_folder_until_its_main_has_ended(tmp_path):
    config = Options(output_dir=str(tmp_path))
    assert open_and(lambda: 3)(config) == 3
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="any reason"):
        open_and(lambda: (_ for _ in ()).throw(UserError("any reason")))(config)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_run_made_is_gone_if_it_left_nothing_there(tmp_path):
    config = Options(output_dir=str(tmp_path / "new"))
    open_and(lambda: 3)(config)
    assert not (tmp_path / "new").exists()
    open_and((tmp_path / "new/left").touch)(config)
    assert (tmp_path / "new/left").exists()


def test_a_holder_that_ends_makes_way(holder, tmp_path, monkeypatch):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            holder.stdin.write("\n")
            holder.stdin.flush()
            holder.wait(30)

    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    folder_lock.acquire(tmp_path)
    assert len(naps) == 3
    assert str(folder_lock.os.getpid()) in (tmp_path / ".lock").read_text()
    folder_lock.release_all()


def test_a_holder_that_was_killed_is_none(holder, tmp_path, capsys):
    runs.end(holder)
    assert (tmp_path / ".lock").exists()
    folder_lock.acquire(tmp_path)
    folder_lock.release_all()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_file_that_its_holder_removed_in_between_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path, flock, replaced = tmp_path / ".lock", fcntl.flock, []

    def replace(stream, how):
        flock(stream, how)
        if not replaced:
            path.unlink()
            path.write_text("of another run")
            replaced.append(path.stat().st_ino)

    monkeypatch.setattr(fcntl, "flock", replace)
    stream = folder_lock.try_to_lock(path)
    assert folder_lock.os.fstat(stream.fileno()).st_ino == replaced[0] == path.stat().st_ino
    stream.close()


def test_a_file_system_without_locks_is_said_and_no_obstacle(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder_lock.acquire(tmp_path)
    folder_lock.release_all()
    assert "cannot be locked (No locks available): another run in this folder would not be noticed" in (
        capsys.readouterr().out
    )
