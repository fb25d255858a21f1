"""Only one run at a time uses an output folder; the lock of a dead process has no effect."""

import errno
import fcntl
import multiprocessing
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from filelock import FileLock, Timeout

from shared.config.options import Options
from shared.errors import UserError
from shared.processes import folder_lock, starting
from shared.run import resume


def hold(folder, pipe):
    """Lock `folder`, until the process is killed."""
    folder_lock.acquire(folder)
    pipe.send("locked")
    signal.pause()


def is_locked(folder):
    """Whether a process holds the lock of `folder`."""
    try:
        with FileLock(Path(folder) / ".lock", blocking=False):
            return False
    except Timeout:
        return True


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the lock of `tmp_path`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "locked"
    yield process
    process.kill()
    process.join()


def test_the_lock_file_names_its_process_and_is_removed_on_release(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["predict", "\udcff.csv"])  # a name in another encoding
    folder_lock.acquire(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {folder_lock.os.getpid()} on ")
    assert is_locked(tmp_path)
    thread = threading.Thread(target=folder_lock.release_all)  # any thread can release it
    thread.start()
    thread.join(30)
    assert not list(tmp_path.iterdir())


ALONE = SimpleNamespace(
    num_processes=1, is_main_process=True, is_local_main_process=True, mixed_precision="no", print=print
)


def test_a_run_in_a_folder_in_use_waits_is_refused_and_changes_nothing(holder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.5)
    with pytest.raises(UserError, match=f"--output_dir .* is in use by process {holder.pid} on "):
        resume.open_run(ALONE, Options(output_dir=str(tmp_path)), [])
    assert capsys.readouterr().out.count("is in use by process") == 1
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def open_and(end):
    """The `main` of a recipe that opens its folder and then calls `end`."""

    def main(config):
        with starting.freed_after():
            resume.open_run(ALONE, config, [])
            assert is_locked(config.output_dir)
            return end()

    return main


def test_a_run_holds_the_lock_until_its_main_ends(tmp_path):
    config = Options(output_dir=str(tmp_path / "new"))
    assert open_and(lambda: 3)(config) == 3
    with pytest.raises(UserError, match="any reason"):
        open_and(lambda: (_ for _ in ()).throw(UserError("any reason")))(config)
    assert not list((tmp_path / "new").iterdir())


def test_a_waiting_run_gets_the_lock_when_its_holder_is_killed(holder, tmp_path, monkeypatch, capsys):
    tries = []

    def flock(fd, how):
        tries.append(how)
        if len(tries) == 3:
            holder.kill()
            holder.join(30)
        fcntl_flock(fd, how)

    fcntl_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    folder_lock.acquire(tmp_path)
    assert len(tries) >= 3
    assert "is in use by process" in capsys.readouterr().out
    assert str(folder_lock.os.getpid()) in (tmp_path / ".lock").read_text()
    assert is_locked(tmp_path)
    folder_lock.release_all()


def test_a_lock_file_that_was_replaced_before_it_was_locked_does_not_count(tmp_path, monkeypatch):
    path, flock, replaced = tmp_path / ".lock", fcntl.flock, []

    def replace(fd, how):
        flock(fd, how)
        if not replaced:
            path.unlink()
            path.write_text("of another run")
            replaced.append(path.stat().st_ino)

    monkeypatch.setattr(fcntl, "flock", replace)
    folder_lock.acquire(tmp_path)
    assert path.stat().st_ino == replaced[0]
    assert is_locked(tmp_path)
    folder_lock.release_all()


def test_a_forked_child_neither_releases_nor_keeps_the_lock_of_its_parent(tmp_path):
    folder_lock.acquire(tmp_path)
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join(30)
    assert is_locked(tmp_path)
    alive = multiprocessing.get_context("fork").Process(target=signal.pause)
    alive.start()
    try:
        folder_lock.release_all()
        assert not is_locked(tmp_path)
    finally:
        alive.kill()
        alive.join(30)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported_and_the_run_continues(tmp_path, monkeypatch, capsys, code):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(code, "no locks")))
    folder_lock.acquire(tmp_path)
    folder_lock.release_all()
    assert "cannot be locked (no locks)" in capsys.readouterr().out
