"""How a process ends: its exit code, its one-line message, and the messages of the other processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from shared.config.options import Options
from shared.errors import Preempted, UserError
from shared.processes import ending, signals
from shared.run import command

pytestmark = pytest.mark.usefixtures("launched_by_nobody")
IT_HAS_NO = "upsample_bicubic2d_backward does not have a deterministic implementation"


class Left(BaseException):
    """Raised in place of ending the process."""


@pytest.fixture
def leaving(monkeypatch, tmp_path):
    """Record exits and waits instead of performing them; `on_sleep` is called during each wait."""
    seen = SimpleNamespace(codes=[], waited=0.0, on_sleep=lambda: None)

    def leave(code):
        seen.codes.append(code)
        raise Left

    def sleep(seconds):
        seen.waited += seconds
        seen.on_sleep()

    monkeypatch.setattr(ending, "exit_now", leave)
    monkeypatch.setattr(command, "exit_now", leave)
    monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: seen.waited, time=time.time))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signals, "listen", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    return seen


def run_recipe(error):
    def main(_):
        raise error

    command.run(main, Options)


def refuse(monkeypatch, rank):
    with monkeypatch.context() as there:
        there.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(Left):
            ending.exit_with_error(UserError("--seed x: give a number"))


@pytest.mark.parametrize("first", [0, 1])
def test_local_rank_0_prints_the_error_of_all_and_the_first_process_to_end_waits(leaving, monkeypatch, capsys, first):
    def refuse_later():
        if leaving.waited > 3:
            leaving.on_sleep = lambda: None
            refuse(monkeypatch, 1 - first)

    leaving.on_sleep = refuse_later
    refuse(monkeypatch, first)
    assert capsys.readouterr().err == "error: --seed x: give a number\n"
    assert 3 < leaving.waited < 4
    assert leaving.codes == [2, 2]


@pytest.mark.parametrize("mark", ["none", "of an earlier launch", "of another launch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_only_one_process_is_printed_by_that_process(leaving, monkeypatch, capsys, tmp_path, mark, rank):
    if mark != "none":
        refuse(monkeypatch, 1 - rank)
        capsys.readouterr()
        leaving.waited = 0
        if mark == "of an earlier launch":
            (path,) = tmp_path.iterdir()
            long_ago = ending.ENTRY.pack(psutil.Process().create_time() - 60, 2)
            path.write_bytes(long_ago * (path.stat().st_size // len(long_ago)))
        else:
            monkeypatch.setenv("MASTER_PORT", "23456")
    refuse(monkeypatch, rank)
    assert capsys.readouterr().err == "error: --seed x: give a number\n"
    assert 10 <= leaving.waited < 11
    assert leaving.codes[-1] == 2


def test_a_single_process_does_not_wait(leaving, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    refuse(monkeypatch, 0)
    assert leaving.waited == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("--seed x: give a number"), 2, "error: --seed x: give a number\n"),
        (Preempted(), 143, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full"),
        (Exception("No space left on device (os error 28)"), 2, "error: the disk is full"),  # of tokenizers
        (RuntimeError(f"{IT_HAS_NO}, but you set"), 2, f"error: --deterministic: {IT_HAS_NO}: leave it out\n"),
    ],
)
def test_the_exit_code_and_one_line_tell_why_a_run_ended(leaving, monkeypatch, capsys, error, code, said):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(Left):
        run_recipe(error)
    assert leaving.codes == [code]
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == (1 if said else 0)


def test_an_unexpected_error_keeps_its_traceback_and_is_recorded_for_the_others(leaving, monkeypatch):
    for error in (ValueError("ours"), FileNotFoundError(errno.ENOENT, "ours")):
        recorded = []
        monkeypatch.setattr(ending, "record", lambda *reason, recorded=recorded: recorded.append(reason))
        with pytest.raises(type(error), match="ours"):
            run_recipe(error)
        assert recorded == [(1, f"{type(error).__name__}, see its output")]
    assert leaving.codes == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (143, ""),
        (1, "error: rank 1 on {} has ended: see its output\n"),
        (2, ""),  # rank 1 prints its error itself
    ],
)
def test_a_process_whose_peer_ended_names_it_and_takes_its_exit_code(leaving, monkeypatch, capsys, code, line):
    with monkeypatch.context() as there:  # another process records its exit code
        there.setenv("LOCAL_RANK", "1")
        ending.record(code)
    with pytest.raises(Left):
        run_recipe(RuntimeError("ours"))
    assert leaving.codes == [code]
    assert capsys.readouterr().err == line.format(socket.gethostname())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # restarted immediately: the record is almost as new
    with pytest.raises(RuntimeError, match="ours"):
        run_recipe(RuntimeError("ours"))


def test_a_lost_connection_is_reported_in_one_line_with_the_process_that_ended_if_known(monkeypatch):
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:24601\nframe #0")
    monkeypatch.setattr(ending, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(ending, "known", ending.Peers())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert ending.peer_behind(ValueError("Connection closed by peer")) is None
    assert ending.peer_behind(RuntimeError("a shape that does not fit")) is None
    assert ending.peer_behind(gloo).line.startswith("the connection to another process is lost (")

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = ending.identity()
    ending.known.processes = [own, own | {"pid": dead.pid, "host": "there"}]
    peer = ending.peer_behind(gloo)
    assert peer.line.startswith(f"rank 1 (process {dead.pid} on there) has ended without a message: it was killed")
    ending.known.processes[1]["machine"] = "another"  # there, this id belongs to another process
    assert ending.peer_behind(gloo).line.startswith("the connection to another process is lost")

    ending.known.store = torch.distributed.HashStore()
    ending.record(2, "--seed x: give a number")
    assert ending.ended_peer() is None, "this process recorded it itself"
    word = ending.identity() | {"host": "there", "rank": 3, "code": 2, "why": "--train_file a.csv does not exist"}
    ending.known.store.set(ending.STORE_KEY, json.dumps(word))
    peer = ending.peer_behind(gloo)
    assert (peer.code, peer.line) == (2, "rank 3 on there has ended: --train_file a.csv does not exist")


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_process_ended_by_a_signal_tells_its_peers_and_no_exit_leaves_a_file(monkeypatch, tmp_path, code):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ending.open_file()
    ending.exit_now(code)
    assert ended == [code]
    assert not ending.peers_that_ended(code), "this process is no peer of its own"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ending.peers_that_ended(143) == [1] * (code == 143)
    assert not ending.peer_failed()
    assert not list(tmp_path.iterdir())
