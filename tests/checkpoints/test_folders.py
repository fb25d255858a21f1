"""Checkpoints are complete or absent, all damage is found, older ones are removed, and files of others are kept."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoints import folders, resuming
from shared.checkpoints.folders import PARTIAL, Job, complete_in, rotate, write_checkpoint
from shared.disk import remedy, remove_unfinished


def job(folder, step=3, **values):
    return Job(folder / f"step_{step:08d}", tensors={}, contents={"state.json": b"{}"}, **values)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_failure_leaves_no_file_and_a_full_disk_names_the_needed_and_the_free_space(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(OSError, match=r"4\.2 MB are needed, and 0\.0 MB are free$") as full:
        write_checkpoint(Job(tmp_path / "step_00000003", {"model": {"weight": torch.zeros(1 << 20)}}, {}))
    monkeypatch.undo()
    with pytest.raises(OSError, match="No such file or directory") as lost:
        write_checkpoint(job(tmp_path / "lost mount/checkpoints"))
    assert remedy(lost.value) == "restore this folder, or the mount that had it"
    assert remedy(full.value) == "free space"
    assert names(tmp_path) == set()


def test_a_checkpoint_replaces_all_files_of_an_older_one_of_the_same_step(tmp_path):
    write_checkpoint(job(tmp_path))
    (tmp_path / "step_00000003/left over").write_text("of a damaged one")
    write_checkpoint(job(tmp_path))
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
        write_checkpoint(job(tmp_path, step))
    rotate(tmp_path / f"step_{newest:08d}", keep, best, needed_from)
    assert set(complete_in(tmp_path)) == kept
    assert len(names(tmp_path)) == len(kept)


def test_other_files_in_the_folder_are_not_removed_and_links_are_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    write_checkpoint(job(folder, 1))
    (folder / "step_00000001").rename(elsewhere)
    strangers = ["best", ".partial", "step_final", "step_7", "step_00000005"]
    for name in (*strangers, "step_00000002.partial", "x.partial-0123abcd"):
        (folder / name).mkdir()
    for name in ("best", "step_final", "step_7"):
        (folder / name / "manifest.json").write_text("{}")
    (folder / "step_00000004").symlink_to(elsewhere)
    (folder / "step_00000004.partial-0123abcd").symlink_to(elsewhere)
    (folder / "step_00000008").symlink_to("nowhere")
    (folder / "step_00000009").write_text("a file")
    before = names(folder)
    for step in (3, 6):
        write_checkpoint(job(folder, step, keep=1))
    assert set(complete_in(folder)) == {6}
    remove_unfinished(folder, PARTIAL)
    assert names(folder) == before | {"step_00000006"}
    assert names(elsewhere) == {"state.json", "manifest.json"}


def test_a_folder_that_cannot_be_removed_is_reported(tmp_path, monkeypatch, capfd):
    for step in (3, 6):
        write_checkpoint(job(tmp_path, step))
    monkeypatch.setattr(Path, "rename", lambda *_: Path("/nowhere").stat())
    rotate(tmp_path / "step_00000006", keep=1, best=None)
    assert set(complete_in(tmp_path)) == {3, 6}
    assert "step_00000003 cannot be removed ([Errno 2] No such file" in capfd.readouterr().err


def test_a_checkpoint_whose_removal_is_interrupted_does_not_count(tmp_path, monkeypatch):
    for step in (3, 6):
        write_checkpoint(job(tmp_path, step))
    monkeypatch.setattr(folders, "remove", lambda _: None)
    rotate(tmp_path / "step_00000006", keep=1, best=None)
    assert set(complete_in(tmp_path)) == {6}
    (left,) = tmp_path.glob(PARTIAL)
    assert left.name.startswith("step_00000003.partial-")


# Digests

CONTENTS = {
    "model.safetensors": bytes(range(256)) * 40,
    "optimizer.bin": os.urandom(12345),
    "optimizer_1.bin": os.urandom(12345),
    "state.json": b'{"step": 3}',
}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose manifest has the digests of a second implementation."""
    path = tmp_path / "step_00000003"
    write_checkpoint(Job(path, tensors={}, contents=CONTENTS))
    manifest = {
        name: {"bytes": len(text), "xxh3_128": xxhash.xxh3_128_hexdigest(text)} for name, text in CONTENTS.items()
    }
    assert json.loads((path / "manifest.json").read_text()) == manifest
    assert folders.lines_of({name: path / name for name in CONTENTS}) == manifest
    return path


def flipped(content, data):
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    byte = content[bit // 8] ^ 1 << bit % 8
    return content[: bit // 8] + bytes([byte]) + content[bit // 8 + 1 :]


DAMAGES = {
    "a flipped bit": flipped,
    "cut": lambda content, data: content[: data.draw(st.integers(0, len(content) - 1))],
    "grown": lambda content, data: content + data.draw(st.binary(min_size=1, max_size=9)),
    "of another file": lambda content, data: data.draw(st.sampled_from(sorted({*CONTENTS.values()} - {content}))),
    # As if the end had never reached the disk.
    "zeroed": lambda content, data: content[: data.draw(st.integers(0, len(content) - 1))].ljust(len(content), b"\0"),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(DAMAGES)), st.sampled_from(sorted(CONTENTS)), st.data())
def test_every_damage_to_a_file_is_found(checkpoint, damage, name, data):
    damaged = DAMAGES[damage](CONTENTS[name], data)
    (checkpoint / name).write_bytes(damaged)
    problem = resuming.problem_with(checkpoint)
    (checkpoint / name).write_bytes(CONTENTS[name])
    assert problem == (f"{name} is damaged" if damaged != CONTENTS[name] else None)
    assert resuming.problem_with(checkpoint) is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_bit_of_a_manifest_is_found(checkpoint, data):
    manifest = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(flipped(manifest, data))
    problem = resuming.problem_with(checkpoint)
    (checkpoint / "manifest.json").write_bytes(manifest)
    assert problem is not None
