"""Checkpoints in a mirror are complete or absent, rotated as in the folder, and loaded where the folder has none."""

import dataclasses
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import runs
from runs import refusal
from s3_server import S3Server

from shared.checkpoints import folders, resuming
from shared.config import options
from shared.options.data_options import ExtraOptions
from shared.processes import folder_lock
from shared.remote import mirror
from shared.remote.mirror import Mirror
from shared.remote.object_store import RemoteFolder


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The runs of this test, without pauses, whose threads end with it."""
    monkeypatch.setattr(mirror, "POLL", 0.005)
    monkeypatch.setattr(mirror, "BETWEEN_ATTEMPTS", 0.005)
    RemoteFolder("s3://bucket", "").reopen()  # the server of another test had another port
    found = []
    yield found
    for run in found:
        run.end()


class Run:
    """A run on one process: what a mirror reads of it, its start, and its saves."""

    def __init__(self, output, url, **changes):
        self.output, self.card = Path(output), {}
        self.config = dataclasses.replace(
            ExtraOptions(output_dir=str(output), mirror_checkpoints=str(url), save_total_limit=2), **changes
        )
        self.accelerator = SimpleNamespace(
            num_processes=1, is_main_process=True, is_local_main_process=True, mixed_precision="no", print=print
        )
        self.progress = SimpleNamespace(data=["a", "b"])
        self.mirror = Mirror()
        self.hooks = [self.mirror]

    def start(self):
        """Start as a run does, up to its first step."""
        self.output.mkdir(exist_ok=True)
        (self.output / folder_lock.NAME).touch()
        self.mirror.opened(self)
        self.mirror.folder_locked()
        self.mirror.prepared(self)
        self.mirror.begun(self)
        return self

    def save(self, step, best=None, copied=True):
        """Save a checkpoint, and wait until the mirror has it."""
        settings = options.plain(self.config.settled(self.accelerator, None))
        state = {"step": step, "best_step": best, "config": settings, "data": self.progress.data, "model": None}
        path = folders.path_of(self.output, step)
        with (self.output / "metrics.jsonl").open("a") as log:
            log.write(f'{{"step": {step}}}\n')
        partial = folders.partial_of(path)
        folders.create(partial, 0)
        (partial / "part").mkdir()
        contents = {"state.json": json.dumps(state).encode(), "part/0": bytes([step]) * 5000}
        folders.commit(partial, path, {name: folders.write_file(partial / name, [contents[name]]) for name in contents})
        folders.rotate(path, self.config.save_total_limit, best)
        if copied:
            wait_until(lambda: step in self.mirror.complete and not self.mirror.problem)
        return path

    def end(self):
        if self.mirror.thread:
            (self.output / folder_lock.NAME).unlink(missing_ok=True)
            self.mirror.thread.join()

    def steps(self):
        return sorted(resuming.checkpoints_of(self.output))


FILES = ("part/0", "state.json", "manifest.json")


@pytest.fixture
def start(tmp_path, started):
    """Start a run in a folder of this test, with the mirror `tmp_path/mirror`, or another URL."""

    def start(name="run", url=None, **changes):
        started.append(Run(tmp_path / name, url or f"file://{tmp_path}/mirror", **changes))
        return started[-1].start()

    return start


@pytest.fixture
def folder(tmp_path):
    """The folder behind the mirror."""
    return tmp_path / "mirror"


def files_in(folder, step):
    path = folder / f"step_{step:08d}"
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step_0*"))


def same(output, folder, step):
    """Whether the mirror has the checkpoint of a run."""
    ours, theirs = folders.path_of(output, step), folder / f"step_{step:08d}"
    return all((ours / file).read_bytes() == (theirs / file).read_bytes() for file in FILES)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Complete or absent


def test_a_checkpoint_is_copied_and_loaded_where_the_folder_has_none(start, folder, capsys):
    run = start()
    run.save(3)
    assert files_in(folder, 3) == {*FILES}
    assert same(run.output, folder, 3)
    new = start("new machine")
    assert new.steps() == [3]
    assert same(new.output, folder, 3)
    assert resuming.problem_with(folders.path_of(new.output, 3)) is None
    assert (new.output / "metrics.jsonl").read_text() == '{"step": 3}\n'
    assert new.card == {"mirror": f"file://{folder}, with 1 checkpoint"}
    assert f"copied file://{folder}/step_00000003, 0.0 MB, in " in capsys.readouterr().out
    assert not [*new.output.rglob("*.partial*")]
    assert {path.name for path in folder.iterdir()} == {"step_00000003", "metrics.jsonl"}
    new.save(4)
    assert (start().output / "metrics.jsonl").read_text() == '{"step": 3}\n{"step": 4}\n', "where a line was missing"


def test_a_copy_that_ends_after_any_write_leaves_the_older_checkpoint_the_newest(start, folder, monkeypatch):
    start().save(3)
    write, left = RemoteFolder.write, [0]

    def dying(store, name, pieces):
        left[0] -= 1
        if left[0] >= 0:
            write(store, name, pieces if left[0] else [next(iter(pieces))[:2]])
        if left[0] <= 0:
            raise OSError("the process is killed here")

    for writes in range(1, 5):  # two files of the checkpoint, the log and the manifest; the last one is cut
        monkeypatch.setattr(RemoteFolder, "write", write)
        run = start(f"run {writes}")
        monkeypatch.setattr(RemoteFolder, "write", dying)
        left[0] = writes
        run.save(4, copied=False)
        wait_until(lambda run=run: run.mirror.problem)
        run.end()
        monkeypatch.setattr(RemoteFolder, "write", write)
        new = start(f"new {writes}")
        assert new.steps() == [3]
        new.end()
    run = start("last")
    run.save(4)
    assert start("new machine").steps() == [4]


def test_a_checkpoint_damaged_in_the_mirror_is_skipped_with_a_line_and_written_again(start, folder, capsys):
    run = start(save_total_limit=None)
    for step in range(1, 7):
        run.save(step)
    run.end()
    names = {step: folder / f"step_{step:08d}" for step in range(1, 7)}
    for step, damage in ((6, runs.flip_a_bit), (5, runs.truncate), (4, Path.unlink)):
        damage(names[step] / "part/0")
    runs.truncate(names[3] / "manifest.json")
    runs.flip_a_bit(names[2] / "state.json")
    new = start("new machine", save_total_limit=None)
    assert new.steps() == [1]
    lines = [line for line in capsys.readouterr().err.splitlines() if "is skipped" in line]
    for step, line in zip((6, 5, 4, 3, 2), lines, strict=True):
        assert line.startswith(f"checkpoint file://{folder}/step_{step:08d} is skipped: ")
    new.save(6)
    assert same(new.output, folder, 6)
    shutil.rmtree(names[1])
    for step in (1, 6):
        shutil.rmtree(folders.path_of(new.output, step))
    assert start("new machine", save_total_limit=None).steps() == [6]


def test_a_manifest_with_a_path_outside_the_checkpoint_is_not_followed(start, folder, tmp_path):
    start().save(3)
    manifest = folder / "step_00000003/manifest.json"
    lines = json.loads(manifest.read_text())
    outside = folder / "step_00000003/part/0"
    for name in ("../../outside", str(outside)):
        manifest.write_text(json.dumps(lines | {name: lines["part/0"]}))
        shutil.copy(outside, folder.parent / "outside")
        assert start(f"new {len(name)}").steps() == []


def test_checkpoints_of_the_folder_come_first_if_they_are_intact_and_as_new(start, folder):
    run = start()
    run.save(3)
    run.end()
    inode = run.output.joinpath("checkpoints/step_00000003").stat().st_ino
    again = start()
    assert again.output.joinpath("checkpoints/step_00000003").stat().st_ino == inode
    again.end()
    runs.flip_a_bit(run.output / "checkpoints/step_00000003/part/0")
    start().end()
    assert same(run.output, folder, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFolder, "write", lambda *_: None)
        run.save(5, copied=False)
    last = start()
    assert last.steps() == [3, 5]
    assert last.mirror._wait(30) == ""
    assert same(run.output, folder, 5)


# Rotation


def test_the_mirror_keeps_the_checkpoints_of_the_folder_and_files_of_others(start, folder):
    run = start(load_best_model_at_end=True)
    unfinished = folder / "step_00000002/part"
    for step, best in ((1, 1), (3, 3), (4, 3), (5, 3)):
        if step == 3:
            unfinished.mkdir(parents=True)
            (unfinished / "0").write_bytes(b"of a killed process")
            (folder / "step_of_others").mkdir()
            (folder / "step_of_others/a").write_bytes(b"")
        run.save(step, best)
        wait_until(lambda: not unfinished.exists())
    wait_until(lambda: steps_in(folder) == run.steps() == [3, 4, 5])
    assert files_in(folder, 2) == set()
    new = start("new machine", load_best_model_at_end=True)
    assert new.steps() == [3, 5], "the newest one, and the best one that it refers to"


@pytest.mark.parametrize(("intact", "copied"), [(True, [1, 3]), (False, [3])])
def test_the_best_checkpoint_is_copied_before_one_that_refers_to_it_unless_it_is_damaged(
    start, monkeypatch, intact, copied
):
    names, write = [], RemoteFolder.write
    run = start(load_best_model_at_end=True)
    run.end()
    saved = [run.save(step, best=1, copied=False) for step in (1, 2, 3)]
    if not intact:
        runs.flip_a_bit(saved[0] / "part/0")
    monkeypatch.setattr(RemoteFolder, "write", lambda store, name, _: (names.append(name), write(store, name, _)))
    assert start(load_best_model_at_end=True).mirror._wait(30) == ""
    assert [name for name in names if "manifest" in name] == [f"step_0000000{step}/manifest.json" for step in copied]


# A store that fails


def test_an_outage_is_one_warning_and_afterwards_the_newest_checkpoint_is_copied(start, folder, monkeypatch, capsys):
    run = start(save_total_limit=3)
    run.save(1)
    write, failing = RemoteFolder.write, Mock(side_effect=OSError("Service Unavailable"))
    where = f"--mirror_checkpoints file://{folder}"
    for steps in ((2, 3), (4, 5)):
        monkeypatch.setattr(RemoteFolder, "write", failing)
        failing.reset_mock()
        for step in steps:
            run.save(step, copied=False)
        wait_until(lambda: failing.call_count > 5)
        monkeypatch.setattr(RemoteFolder, "write", write)
        wait_until(lambda steps=steps: steps[1] in run.mirror.complete and not run.mirror.problem)
        warning, over = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {where} cannot be written (OSError: Service Unavailable): the training ")
        assert over == f"{where} has step_0000000{steps[1]}: it can be written again"
    wait_until(lambda: steps_in(folder) == [1, 3, 5])


@pytest.mark.parametrize(("damage", "problem"), [(runs.flip_a_bit, "is damaged"), (Path.unlink, "cannot be read")])
def test_a_checkpoint_that_is_damaged_or_removed_meanwhile_is_a_warning(start, folder, capsys, damage, problem):
    run = start()
    run.end()
    damage(run.save(1, copied=False) / "part/0")
    run = start()
    wait_until(lambda: run.mirror.problem)
    assert f"step_00000001 could not be copied (Damaged: part/0 {problem}" in run.mirror._wait(0)
    assert capsys.readouterr().err.count(f"cannot be written (Damaged: part/0 {problem}") == 1
    run.save(2)
    assert files_in(folder, 2) == {*FILES}
    assert "manifest.json" not in files_in(folder, 1)


def test_the_end_waits_for_the_last_checkpoint_for_a_bounded_time(start, folder, monkeypatch, capsys):
    run, write = start(), RemoteFolder.write
    monkeypatch.setattr(RemoteFolder, "write", Mock(side_effect=OSError("Service Unavailable")))
    monkeypatch.setattr(mirror, "PATIENCE_AT_END", 0.2)
    monkeypatch.setattr(mirror, "PATIENCE_AT_SIGNAL", 0.1)
    run.mirror.exported(run.output / "model")  # there is no checkpoint
    run.save(1, copied=False)
    wait_until(lambda: run.mirror.problem)
    expected = f"--mirror_checkpoints file://{folder}: step_00000001 could not be copied (OSError: Service Unavailable)"
    retry = f"{expected}: start again to retry, or leave the flag out; {run.output}/model has the model"
    assert refusal(run.mirror.exported, run.output / "model") == retry
    capsys.readouterr()
    run.mirror.closed()
    assert capsys.readouterr().err == f"warning: {expected}; it is in {run.output}\n"
    monkeypatch.setattr(RemoteFolder, "write", write)
    start().mirror.closed()  # a new start tries again, and a signal waits for the upload
    assert steps_in(folder) == [1]


def test_a_thread_ends_with_the_lock_of_the_folder(start):
    run = start()
    (run.output / folder_lock.NAME).unlink()
    wait_until(lambda: not run.mirror.thread.is_alive())


# Refusals


def test_the_mirror_of_another_run_is_refused_and_nothing_is_copied(start, folder, tmp_path):
    run = start()
    run.save(3)
    where = f"--mirror_checkpoints file://{folder}"
    assert refusal(start, "other", resume_from_checkpoint="never") == (
        f"--resume_from_checkpoint never, but {where} holds checkpoints up to step 3: name another URL, or remove them"
    )
    assert not (tmp_path / "other/checkpoints").exists()
    other = Run(tmp_path / "other", f"file://{folder}")
    other.progress.data = ["c"]
    assert refusal(other.start) == f"{where} holds a run with other data: name another URL for a new run"
    expected = f"{where} belongs to a run with other settings (--seed was 0, is 1): use the old values to resume it"
    assert refusal(start, "other", seed=1).startswith(expected)
    start("third", logging_steps=3, resume_from_checkpoint="out/checkpoints/step_00000001")
    assert not (tmp_path / "third/checkpoints").exists(), "this run asks for a checkpoint of its own"


def test_a_mirror_that_cannot_be_used_is_one_line(start, monkeypatch):
    check = "cannot be used (check the URL, the credentials and the network)"
    assert refusal(start, url="s4://b/x") == f"--mirror_checkpoints s4://b/x {check}: Protocol not known: s4"
    assert "is given with a password" in refusal(start, url="s3://me:secret@host/x")
    assert refusal(start, url="/mnt/x").startswith("--mirror_checkpoints /mnt/x is no URL: give one such as s3://")
    assert "file://mnt/x names no path of this machine" in refusal(start, url="file://mnt/x")

    denied = []
    with S3Server("bucket", answer=lambda *request: (403, "AccessDenied") if request[0] in denied else None) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        start(url="s3://bucket/run").save(1)
        assert "does not list what is written there" in refusal(start, "new", url="s3://bucket//run")
        nowhere = f"--mirror_checkpoints s3://nowhere/run {check}: The specified bucket does not exist"
        assert refusal(start, "new", url="s3://nowhere/run") == nowhere
        for method in ("PUT", "POST", "GET"):
            denied[:] = [method]
            problem = refusal(start, "new", url="s3://bucket/run")
            assert problem == f"--mirror_checkpoints s3://bucket/run {check}: AccessDenied"


def test_credentials_that_expire_are_read_again(start, monkeypatch, tmp_path):
    """As an agent renews them in a file; those in the environment would stay as they are."""
    valid = {"old", "owner"}
    with S3Server("bucket", answer=lambda _, __, key: None if key in valid else (400, "ExpiredToken")) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        credentials = tmp_path / "credentials"
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
        credentials.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = secret\n")
        run = start(url="s3://bucket/run")
        run.save(1)
        valid.symmetric_difference_update({"old", "new"})
        run.save(2, copied=False)
        wait_until(lambda: run.mirror.problem)
        assert run.mirror.problem == "PermissionError: ExpiredToken"
        assert "run/step_00000002/manifest.json" not in server.names("bucket")
        credentials.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = secret\n")
        wait_until(lambda: 2 in run.mirror.complete)
        assert "run/step_00000002/manifest.json" in server.names("bucket")
        valid.symmetric_difference_update({"new", "newest"})
        credentials.write_text("[default]\naws_access_key_id = newest\naws_secret_access_key = secret\n")
        read = RemoteFolder("s3://bucket/run/step_00000002", "--prepared_data").read
        assert read("part/0", range(9)) == bytes([2]) * 9
        valid.clear()
        assert "/part/0 cannot be read (PermissionError: ExpiredToken): check the" in refusal(read, "part/0", range(9))
