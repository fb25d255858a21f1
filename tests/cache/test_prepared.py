"""Damaged prepared data is rebuilt, with one message, after any kind of damage."""

import contextlib
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from runs import flip_a_bit, truncate

from shared.cache import prepared
from shared.cache.prepared import mapped_file, shared_array
from shared.images.cache import build
from shared.images.decoding import Square
from shared.images.sources import class_folders

pytestmark = pytest.mark.usefixtures("own_cache")


def fill(folder):
    for name in ("a", "b", "c"):
        np.save(folder / name, np.arange(9))


def arrays(_):
    return [np.load(file).tolist() for file in sorted(prepared.build_once("arrays", fill).glob("*.npy"))]


def images(folder):
    for name in ("cat", "dog"):
        if not (folder / name).exists():
            (folder / name).mkdir(parents=True)
            Image.new("RGB", (9, 8), (9, 0, 0)).save(folder / name / "1.png")
    source = class_folders(str(folder), "--train_dir")
    squares, aspects, corrupt = build(source.key, len(source), source.stored, source.name, Square(8))
    return squares[np.arange(2)].tolist(), aspects.tolist(), corrupt.tolist()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda file: file.write_bytes(b""), lambda f: f.unlink()])
@pytest.mark.parametrize("prepare", [arrays, images])
def test_damaged_data_is_rebuilt_with_a_message(tmp_path, capfd, prepare, damage):
    right = prepare(tmp_path / "images")
    assert prepare(tmp_path / "images") == right
    assert "is damaged" not in capfd.readouterr().err
    folders = [path.parent for path in prepared.cache_dir().rglob("complete.json")]
    files = [path for folder in folders for path in folder.iterdir() if path.stat().st_size]
    assert len(files) >= 3
    for file in files:
        damage(file)
    assert prepare(tmp_path / "images") == right
    output = capfd.readouterr().err
    for folder in folders:
        assert f"{folder} is damaged or from an older version: building it again\n" in output
    assert output.count("building it again") == len(folders)
    assert prepare(tmp_path / "images") == right
    assert "is damaged" not in capfd.readouterr().err
    left = [path.parent for path in prepared.cache_dir().rglob("complete.json")]
    assert {*left} == {*folders}


def test_a_process_that_has_mapped_the_old_data_can_still_read_it():
    mapped = np.load(prepared.build_once("x", fill) / "a.npy", mmap_mode="r")
    (prepared.cache_dir() / "x/complete.json").unlink()
    assert np.load(prepared.build_once("x", fill) / "a.npy").tolist() == mapped.tolist() == list(range(9))


def test_files_of_a_killed_build_are_removed_and_a_build_is_synced_before_it_gets_its_name(monkeypatch):
    here = prepared.cache_dir()
    for name in ("corpus-a.partial-killed", "corpus-b.partial-under-way"):
        (here / name).mkdir(parents=True)
        (here / name / "tokens").write_text("half")
    order = []
    monkeypatch.setattr(prepared, "sync", lambda path: order.append((path.name, (here / "corpus-a").exists())))
    built = prepared.build_once("corpus-a", lambda folder: (folder / "tokens").write_text("whole"))
    assert (built / "tokens").read_text() == "whole"
    assert [path.name for path in here.iterdir() if "partial" in path.name] == ["corpus-b.partial-under-way"]
    assert sorted(order[:2]) == [("complete.json", False), ("tokens", False)]
    (folder, as_early), (parent, late) = order[2:]
    assert (as_early, parent, late) == (False, here.name, True)
    assert folder.startswith("corpus-a.partial-")


def test_without_locks_between_machines_the_first_to_finish_wins(monkeypatch):
    calls = []

    def build(folder):
        calls.append(folder)
        if len(calls) == 1:
            prepared.build_once("x", build)
        (folder / "a").write_text("content")

    no_lock = SimpleNamespace(acquire=lambda blocking: contextlib.nullcontext())  # of other machines
    monkeypatch.setattr(prepared, "FileLock", lambda _: no_lock)
    monkeypatch.setattr(socket, "gethostname", lambda: f"machine{len(calls)}")
    assert (prepared.build_once("x", build) / "a").read_text() == "content"
    assert len(calls) == 2
    assert [path.name for path in prepared.cache_dir().iterdir()] == ["x"]


@given(st.lists(st.lists(st.integers(0, 200), max_size=5), max_size=5), st.sampled_from(["int64", "uint8", "float32"]))
@settings(max_examples=30)
def test_an_array_of_blocks_is_their_concatenation_wherever_it_is_stored(parts, dtype):
    blocks = [np.array(part, np.int64) for part in parts]
    expected = np.concatenate([np.empty(0, np.int64), *blocks]).astype(dtype)
    for most in (-1, 8, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared, "IN_MEMORY", most)
            found = shared_array(lambda: iter(blocks), dtype)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
        assert (mapped_file(found) is None) == (expected.nbytes <= most)
