"""Measure the backend's all-reduce beside two rings made of send and receive: time, bandwidth, bytes sent.

    torchrun --nproc-per-node 2 benchmarks/collectives.py --output_dir out/collectives

The bandwidths are defined as in nccl-tests. Algorithm bandwidth is the size of the tensor divided by the time. Bus
bandwidth is that times 2(n-1)/n, the share that a link has to carry when n processes reduce with the least traffic, so
it can be compared with the bandwidth of the link. Writes collectives.json and collectives.md into the output folder.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine

PIECE = 1 << 20  # bytes per piece of the pipelined ring: many for the fixed cost of a message, few for a chunk
Works = dict[tuple[int, int], Any]


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """Views of `count` parts of a flat tensor; their lengths differ by one at most, and some may be empty."""
    bounds = [i * len(tensor) // count for i in range(count + 1)]
    return [tensor[start:end] for start, end in pairwise(bounds)]


def ring_all_reduce(tensor: Tensor, group: Any = None) -> int:
    """Sum a flat tensor over the group, in place, around a ring; the number of bytes that this process sent.

    Reduce-scatter: in each of n-1 rounds every process sends one of n chunks to its right neighbour and adds the chunk
    that comes from its left neighbour. Then each process has one chunk of the sum. All-gather: n-1 more rounds pass
    these chunks around. Each process sends 2(n-1)/n of the tensor (Patarasuk and Yuan, 2009). The send and the receive
    of a round start together, so that large messages cannot deadlock.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    right, left = (dist.get_global_rank(group or dist.group.WORLD, (rank + way) % size) for way in (1, -1))
    parts, sent = chunks(tensor, size), 0

    def exchange(out: Tensor, into: Tensor) -> None:
        operations = []  # none for an empty chunk, which would still be a message
        if len(out):
            operations.append(dist.P2POp(dist.isend, out, right, group))
        if len(into):
            operations.append(dist.P2POp(dist.irecv, into, left, group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    for step in range(2 * (size - 1)):
        out, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        if step < size - 1:
            arrived = torch.empty_like(into)
            exchange(out, arrived)
            into += arrived
        else:
            exchange(out, into)
        sent += out.numel() * out.element_size()
    return sent


def pipelined_ring_all_reduce(tensor: Tensor, group: Any = None, piece_bytes: int = PIECE) -> int:
    """`ring_all_reduce` in pieces: some are on their way while others are added; the number of bytes sent.

    A process sends in one round the chunk that it added up in the round before. Here it sends each piece as soon as the
    piece is added, without waiting for the rest of the chunk. Receives start one round ahead.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    right, left = (dist.get_global_rank(group or dist.group.WORLD, (rank + way) % size) for way in (1, -1))
    parts, rounds = chunks(tensor, size), 2 * (size - 1)
    longest = max(map(len, parts))
    count = max(1, -(-longest * tensor.element_size() // piece_bytes))
    pieces = [chunks(part, count) for part in parts]  # [chunk][piece]
    sends: Works = {}
    receives: dict[tuple[int, int], tuple[Any, Tensor]] = {}
    sent = 0

    def start(step: int, piece: int) -> None:
        """Start the send and the receive of a piece in a round: together, because NCCL requires it."""
        nonlocal sent
        if step >= rounds:
            return
        mine, other = (rank - step) % size, (rank - step - 1) % size
        out, into = pieces[mine][piece], pieces[other][piece]
        if step < size - 1:
            into = torch.empty_like(into)
        elif (other, piece) in sends:
            sends.pop((other, piece)).wait()  # the receive overwrites the piece, so it has to be sent by now
        operations = [dist.P2POp(dist.irecv, into, left, group)] if len(into) else []
        operations += [dist.P2POp(dist.isend, out, right, group)] if len(out) else []
        works = dist.batch_isend_irecv(operations) if operations else []  # one per operation, or one for both
        if len(into):
            receives[step, piece] = works[0], into
        if len(out):
            sends[mine, piece] = works[-1]
            sent += out.numel() * out.element_size()

    for piece in range(count):
        start(0, piece)
    for step in range(rounds):
        for piece in range(count):
            if (step, piece) in receives:
                work, arrived = receives.pop((step, piece))
                work.wait()
                if step < size - 1:
                    pieces[(rank - step - 1) % size][piece].add_(arrived)
            start(step + 1, piece)
    for work in sends.values():
        work.wait()
    return sent


def library_all_reduce(tensor: Tensor, group: Any = None) -> None:
    """The backend's all-reduce; the number of bytes it sends is unknown."""
    dist.all_reduce(tensor, group=group)


METHODS: dict[str, Callable[..., int | None]] = {
    "all_reduce": library_all_reduce,
    "ring": ring_all_reduce,
    "pipelined ring": pipelined_ring_all_reduce,
}


def bandwidths(size: int, seconds: float, processes: int) -> dict[str, float]:
    """Algorithm and bus bandwidth of an all-reduce, in bytes per second, as nccl-tests defines them."""
    algorithm = size / seconds
    return {"algorithm_bandwidth": algorithm, "bus_bandwidth": algorithm * 2 * (processes - 1) / processes}


def measure(method: str, size: int, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row: the median of several calls; the time of a call is that of the slowest process."""
    tensor = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    times, sent = [], 0
    for repeat in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        sent = METHODS[method](tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        tensor.fill_(1)
        if repeat:  # the first call opens the connections
            times.append(slowest.item())
    middle = statistics.median(times)
    row = {"method": method, "bytes": tensor.nbytes, "seconds": middle, "fastest": min(times), "slowest": max(times)}
    return row | bandwidths(tensor.nbytes, middle, dist.get_world_size()) | {"bytes_sent": sent}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    at = report["machine"]
    lines = [
        f"{at['cpu']}, {at['cores']} cores, torch {at['versions']['torch']}, {at['date'][:10]}; {report['processes']} "
        f"processes over {report['backend']}, {report['dtype']}; median of {report['repeats']} (fastest-slowest). "
        f"`{report['command']}`",
        "",
        "| bytes | method | time (ms) | algorithm bandwidth (MB/s) | bus bandwidth (MB/s) | bytes sent per process |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        sent = "" if row["bytes_sent"] is None else f"{row['bytes_sent']:,}"
        span = f"{row['fastest'] * 1e3:,.2f}-{row['slowest'] * 1e3:,.2f}"
        lines.append(
            f"| {row['bytes']:,} | {row['method']} | {row['seconds'] * 1e3:,.2f} ({span}) | "
            f"{row['algorithm_bandwidth'] / 1e6:,.1f} | {row['bus_bandwidth'] / 1e6:,.1f} | {sent} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << shift for shift in range(10, 29, 3)])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output_dir", type=Path, default=Path("out/collectives"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = getattr(torch, arguments.dtype)
    rows = []
    for size in arguments.bytes:
        for method in arguments.methods:
            rows.append(measure(method, size, dtype, device, arguments.repeats))
            if dist.get_rank() == 0:
                row = rows[-1]
                print(f"{size:12,} {method:15} {row['seconds'] * 1e3:9.2f} ms {row['bus_bandwidth'] / 1e6:9.1f} MB/s")
    if dist.get_rank() == 0:
        report = {
            "machine": machine(dist.get_world_size()),
            "processes": dist.get_world_size(),
            "backend": dist.get_backend(),
            "dtype": arguments.dtype,
            "repeats": arguments.repeats,
            "command": command(),
            "rows": rows,
        }
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        (arguments.output_dir / "collectives.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output_dir / "collectives.md").write_text(table(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
