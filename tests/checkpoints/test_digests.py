"""Digests: every damage to a file is found, by XXH3-128 and by the SHA-256 of older checkpoints."""

import hashlib
import json
import os
import resource

import pytest
import runs
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoints import digests, resuming
from shared.checkpoints.digests import CHUNK, write_file
from shared.checkpoints.folders import Job, write

CONTENTS = {
    "model.safetensors": bytes(range(256)) * 40,
    "optimizer.bin": os.urandom(12345),
    "optimizer_1.bin": os.urandom(12345),
    "state.json": b'{"step": 3}',
}


def with_sha256(checkpoint):
    """Replace the manifest by that of an older version."""
    manifest = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in CONTENTS.items()
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(params=["xxh3_128", "xxh3_128 of parts", "sha256"])
def checkpoint(request, tmp_path, monkeypatch):
    if request.param == "xxh3_128 of parts":
        monkeypatch.setattr(digests, "PART", 1000)
    write(Job(tmp_path / "step_00000003", tensors={}, contents=CONTENTS))
    if request.param == "sha256":
        with_sha256(tmp_path / "step_00000003")
    return tmp_path / "step_00000003"


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


def test_the_line_of_a_file_in_the_manifest_names_its_digest_algorithm(tmp_path):
    content = os.urandom(2 * CHUNK + 7)
    line = write_file(tmp_path / "file", [content[:9], b"", memoryview(content)[9:]])
    assert line == {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    assert digests.lines_of({"file": tmp_path / "file"}) == {"file": line}
    (tmp_path / "abc").write_bytes(b"abc")
    assert digests.digest(tmp_path / "abc", "xxh3_128").hex() == "06b05ab6733a618578af5f94892f3950"
    assert digests.digest(tmp_path / "abc", "sha256").hex().startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_large_file_has_the_digest_of_the_digests_of_its_parts(tmp_path):
    content = os.urandom(digests.PART + 5)
    line = write_file(tmp_path / "file", [content[:9], b"", memoryview(content)[9:]])
    parts = b"".join(xxhash.xxh3_128_digest(part) for part in (content[: digests.PART], content[digests.PART :]))
    assert line == {"bytes": len(content), "xxh3_128_of_16_mib_parts": xxhash.xxh3_128_hexdigest(parts)}
    assert digests.lines_of({"file": tmp_path / "file"}) == {"file": line}
    older = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}  # of the whole file
    for entry in (line, older):
        assert digests.problem_with(tmp_path, {"file": entry}) is None
    runs.flip_a_bit(tmp_path / "file")
    for entry in (line, older):
        assert digests.problem_with(tmp_path, {"file": entry}) == "file is damaged"


@pytest.mark.parametrize("line", [{"bytes": 11}, {"bytes": 11, "blake9": "00"}])
def test_a_file_without_a_known_digest_does_not_count_as_intact(tmp_path, line):
    checkpoint = tmp_path / "step_00000003"
    write(Job(checkpoint, tensors={}, contents={"state.json": CONTENTS["state.json"]}))
    (checkpoint / "manifest.json").write_text(json.dumps({"state.json": line}))
    problem = resuming.problem_with(checkpoint)
    assert problem.startswith("its manifest cannot be read (no known digest among ")
    assert ("blake9" in problem) == ("blake9" in line)


def test_a_limit_on_the_size_of_files_is_an_oserror_that_leaves_no_file(tmp_path):
    tensors = {name: {"tensor": torch.randn(3 * CHUNK // 4)} for name in ("a", "b")}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large$"):
            write(Job(tmp_path / "step_00000003", tensors, {"state.json": b"{}"}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    write(Job(tmp_path / "step_00000003", tensors, {"state.json": b"{}"}))
    assert resuming.problem_with(tmp_path / "step_00000003") is None


def test_without_xxhash_checkpoints_get_sha256_and_those_with_xxh3_do_not_count_as_intact(tmp_path):
    write(Job(tmp_path / "step_00000003", tensors={}, contents=CONTENTS))
    (tmp_path / "without.py").write_text(f"""
import sys
sys.modules["xxhash"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "xxhash" else found(name, *more)
from pathlib import Path
from shared.checkpoints import digests, resuming
from shared.checkpoints.folders import Job, write
folder = Path({str(tmp_path)!r})
write(Job(folder / "step_00000004", tensors={{}}, contents={{"state.json": b"1"}}))
print([resuming.problem_with(folder / name) for name in ("step_00000003", "step_00000004")])
""")
    (code,), output = runs.run_forked(1, tmp_path / "without.py", [], tmp_path)
    assert code == 0, output
    assert "no known digest among xxh3_128: pip install xxhash" in output
    assert output.rstrip().endswith("None]")
    assert '"sha256"' in (tmp_path / "step_00000004/manifest.json").read_text()
