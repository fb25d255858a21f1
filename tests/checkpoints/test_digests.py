"""Digests: every damage to a file is found."""

import json
import os

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoints import digests, resuming
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
    assert digests.lines_of({name: path / name for name in CONTENTS}) == manifest
    return path


def flipped(file, data):
    content = bytearray(file.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def cut(file, data):
    os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))


def grown(file, data):
    file.write_bytes(file.read_bytes() + data.draw(st.binary(min_size=1, max_size=9)))


def zeroed(file, data):
    """Zero the end of a file, as if it had never reached the disk."""
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start:] = bytes(len(content) - start)
    file.write_bytes(content)


def swapped(file, data):
    others = sorted(CONTENTS.keys() - {file.name})
    other = file.with_name(data.draw(st.sampled_from(others)))
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs), other.write_bytes(mine)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.sampled_from([flipped, cut, grown, zeroed, swapped]),
    name=st.sampled_from(sorted(CONTENTS)),
    data=st.data(),
)
def test_every_damage_to_a_file_is_found(checkpoint, damage, name, data):
    damage(checkpoint / name, data)
    changed = any((checkpoint / other).read_bytes() != content for other, content in CONTENTS.items())
    problem = resuming.problem_with(checkpoint)
    for other, content in CONTENTS.items():
        (checkpoint / other).write_bytes(content)
    assert (problem is not None) == changed
    assert not changed or problem.endswith(" is damaged")
    assert resuming.problem_with(checkpoint) is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_of_a_manifest_is_found(checkpoint, data):
    manifest = (checkpoint / "manifest.json").read_bytes()
    flipped(checkpoint / "manifest.json", data)
    problem = resuming.problem_with(checkpoint)
    (checkpoint / "manifest.json").write_bytes(manifest)
    assert problem is not None
