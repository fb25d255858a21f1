"""All-reduce over the running backend, beside two written out from send and receive: time, bandwidth, bytes sent.

    torchrun --nproc-per-node 2 benchmarks/collectives.py --output_dir out/collectives

Bandwidths are those of nccl-tests: algorithm bandwidth is the size of the tensor by the time, bus bandwidth is that
times 2(n-1)/n, what a link has to carry when n processes reduce with as little traffic as possible, so that it can be
held against the link's own. Leaves collectives.json and collectives.md in the output folder.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 1 << 20  # bytes of a piece of the pipelined ring: large beside a message's fixed cost, small beside a chunk
Works = dict[tuple[int, int], Any]


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """Views of a flat tensor in `count` parts that differ by one element at most; some are empty when it is shorter."""
    bounds = [i * len(tensor) // count for i in range(count + 1)]
    return [tensor[start:end] for start, end in pairwise(bounds)]


def ring_all_reduce(tensor: Tensor, group: Any = None) -> int:
    """Sum a flat tensor over the group, in place, around a ring; the bytes that this process sent.

    Reduce-scatter: in each of n-1 rounds every process sends one of n chunks to its right neighbour and adds what comes
    from its left, until each has one chunk of the sum. All-gather: n-1 rounds more hand these around. Each process
    sends 2(n-1)/n of the tensor (Patarasuk and Yuan, 2009). Send and receive of a round are started together, so no
    size of message can make all wait for each other.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    right, left = (dist.get_global_rank(group or dist.group.WORLD, (rank + way) % size) for way in (1, -1))
    parts, sent = chunks(tensor, size), 0

    def exchange(out: Tensor, into: Tensor) -> None:
        operations = []  # an empty message would still be one
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
    """The same around the same ring, in pieces that are under way while others are added; the bytes sent.

    What a process has added up in one round is what it sends in the next, so each piece goes on as soon as it is there,
    without waiting for the rest of its chunk. Receives are started a round ahead.
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
        """Send what this process has of a round, and receive what comes in it: together, as NCCL needs it."""
        nonlocal sent
        if step >= rounds:
            return
        mine, other = (rank - step) % size, (rank - step - 1) % size
        out, into = pieces[mine][piece], pieces[other][piece]
        if step < size - 1:
            into = torch.empty_like(into)
        elif (other, piece) in sends:
            sends.pop((other, piece)).wait()  # what this process sent of it has to have left
        operations = [dist.P2POp(dist.irecv, into, left, group)] if len(into) else []
        operations += [dist.P2POp(dist.isend, out, right, group)] if len(out) else []
        works = dist.batch_isend_irecv(operations) if operations else []  # one for each, or one for all
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
    """The backend's own; what it sends is not known here."""
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
    """One row: the median of several calls, each the time of the slowest process."""
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
        if repeat:  # the first one opens connections
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
        from rounds import command, machine

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
