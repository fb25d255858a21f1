"""Digests: every damage to a file is found."""

import json
import os

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoints import folders, resuming
from shared.checkpoints.folders import Job, write

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
    write(Job(path, tensors={}, contents=CONTENTS))
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
