"""Rings of sends and receives give the sums of all_reduce for any length, and send no more bytes than necessary."""

import sys

import pytest
import runs
import torch
import torch.distributed as dist

sys.path.insert(0, str(runs.ROOT))

from benchmarks import collectives

LARGEST = 5
DTYPES = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 3e-2}
LENGTHS = [1, 2, 4, 5, 7, 1000, 4099]
LARGE = 4_000_003  # elements: 16 MB, more than the buffers of any socket here


def compare(_, folder):
    """Compare in groups of two to five: rows of (processes, method, dtype, length, relative error, bytes sent)."""
    found = []
    for size in range(2, LARGEST + 1):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        cases = [(name, length, 64) for name in DTYPES for length in LENGTHS]
        cases.append(("float32", LARGE, collectives.PIECE))
        for name, length, piece in cases:
            generator = torch.Generator().manual_seed(1000 * size + dist.get_rank())
            mine = torch.randn(length, generator=generator, dtype=torch.float64).to(getattr(torch, name))
            expected = mine.clone()
            dist.all_reduce(expected, group=group)
            ring, pipelined = mine.clone(), mine.clone()
            sent = collectives.ring_all_reduce(ring, group)
            sent_in_pieces = collectives.pipelined_ring_all_reduce(pipelined, group, piece)
            for method, got, count in (("ring", ring, sent), ("pipelined", pipelined, sent_in_pieces)):
                scale = expected.double().abs().max().clamp(min=1)
                error = (got.double() - expected.double()).abs().max() / scale
                found.append([size, method, name, length, error.item(), count, float(got.double().sum())])
    dist.barrier()
    return found


DOCS = pytest.mark.docs  # benchmarks/collectives.py has the command of the script


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return runs.in_group(compare, LARGEST, tmp_path_factory.mktemp("rings"))


@DOCS
def test_every_ring_equals_all_reduce_to_rounding(found):
    assert {row[0] for row in found[0]} == set(range(2, LARGEST + 1))
    assert len(found[0]) == 4 * 2 * (len(DTYPES) * len(LENGTHS) + 1)
    for rank in found:
        for size, method, dtype, length, error, _, _ in rank:
            assert error <= DTYPES[dtype], (size, method, dtype, length)


@DOCS
def test_all_processes_have_the_same_sum(found):
    for rank, rows in enumerate(found):
        for row, first in zip(rows, found[0][-len(rows) :], strict=True):
            assert row[0] > rank
            assert row[6] == first[6]


@DOCS
def test_the_bytes_sent_are_the_minimum_to_one_element_per_chunk(found):
    for rank in found:
        for size, _, dtype, length, _, sent, _ in rank:
            element = getattr(torch, dtype).itemsize
            assert abs(sent - 2 * (size - 1) / size * length * element) <= 2 * (size - 1) * element


def test_bandwidths_are_defined_as_in_nccl_tests():
    assert collectives.bandwidths(1000, 0.5, 4) == {"algorithm_bandwidth": 2000, "bus_bandwidth": 3000}
    assert collectives.bandwidths(1000, 0.5, 1)["bus_bandwidth"] == 0


@DOCS
def test_the_script_writes_a_row_per_size_and_method_and_a_table(tmp_path):
    script = [runs.ROOT / "benchmarks/collectives.py", "--bytes", "1024", "8192", "--repeats", "1"]
    runs.succeed(runs.torchrun(2, *script, "--output_dir", tmp_path), CUDA_VISIBLE_DEVICES="")
    report = collectives.json.loads((tmp_path / "collectives.json").read_text())
    assert [(row["bytes"], row["method"]) for row in report["rows"]] == [
        (size, method) for size in (1024, 8192) for method in collectives.METHODS
    ]
    for row in report["rows"]:  # 2(n-1)/n is 1 for two processes
        assert row["bytes_sent"] == (None if row["method"] == "all_reduce" else row["bytes"])
    assert "| 8,192 | pipelined ring |" in (tmp_path / "collectives.md").read_text()
