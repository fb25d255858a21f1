r"""Predict step time and efficiency on 8 to 4,096 processes, from a measured computation and the figures of a link.

    python benchmarks/predict_scaling.py --step_seconds 0.0629 --gradient_bytes 4.38e8 --late_bytes 9.5e7 \
        --bandwidth 3.76e11 --latency 9.6e-6 --tree_latency 5e-5 --ranks_per_machine 8 --machine_bandwidth 3.7e11
    python benchmarks/predict_scaling.py --measured out/links/scaling.json --gradient_bytes 5.6e6 --late_bytes 4.5e6

The first command predicts. The second compares the prediction with what scaling.py measured on limited links.

The model: each process computes the same amount per step (weak scaling). The backward pass of the last micro-batch
takes two thirds of its time and makes gradients at a constant rate, in buckets of 25 MiB. The all-reduce of a bucket
starts when the bucket is full and the all-reduce before has ended; it does not slow down the computation. `late_bytes`
come with the last gradient, such as an embedding's, and overlap with nothing. The model leaves out slower processes,
congestion, the plan of a step and the input of data, so it is an upper bound of the speed. `Work` and `Network`
describe the flags.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.limited_links import GOODPUT

BUCKET = 25 * 2**20  # bytes: DDP's default
BACKWARD = 2 / 3  # of a micro-batch's computation: two of three matrix products
TREE_SHARE = 0.9  # of a ring's bandwidth that a tree reaches: NCCL's own model, github.com/NVIDIA/nccl, tuning.cc
COUNTS = [8, 64, 512, 4096]  # processes of the table


@dataclass(frozen=True)
class Network:
    """The links that an all-reduce uses, in seconds and bytes per second."""

    bandwidth: float = math.inf
    """Out of a machine, over all its network cards together."""
    latency: float = 0.0
    """Of a message between machines, in a ring."""
    tree_latency: float = math.inf
    """Of a message between two levels of a tree over the machines; infinite: only rings."""
    ranks_per_machine: int = 1
    machine_latency: float = 0.0
    """Of a message inside a machine."""
    machine_bandwidth: float = math.inf
    """Of each rank, inside a machine."""


@dataclass(frozen=True)
class Work:
    """What one process does in a step."""

    computation: float
    """Seconds without communication, over all micro-batches, with the update."""
    gradient_bytes: float
    """Of all parameters."""
    late_bytes: float = 0.0
    """Those of them that come with the last gradient."""
    micro_batches: int = 1
    """All-reduces overlap with the last one only."""
    update: float = 0.0
    """Seconds of `computation` that the update takes."""

    @property
    def backward(self) -> float:
        """Seconds of the backward pass of the last micro-batch."""
        return BACKWARD * (self.computation - self.update) / self.micro_batches


def ring_seconds(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of an all-reduce of `size` bytes around a ring: 2(n-1) messages, 2(n-1)/n of the bytes through a link.

    The bytes are those of nccl-tests (doc/PERFORMANCE.md), whose bus bandwidth is `bandwidth` here.
    """
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * size / bandwidth


def tree_seconds(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of an all-reduce of `size` bytes up and down a double binary tree, as NCCL models it (tuning.cc)."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * latency + 2 * size / (TREE_SHARE * bandwidth)


def all_reduce_seconds(size: float, ranks: int, network: Network) -> float:
    """Seconds of a hierarchical all-reduce: a ring inside each machine, then the faster of ring and tree between them.

    The ranks of a machine use its network cards side by side, each for its part of the bytes. The two phases follow one
    another, which NCCL partly avoids.
    """
    inside = min(ranks, network.ranks_per_machine)
    machines = math.ceil(ranks / network.ranks_per_machine)
    within = ring_seconds(size, inside, network.machine_latency, network.machine_bandwidth)
    ring = ring_seconds(size, machines, network.latency, network.bandwidth)
    return within + min(ring, tree_seconds(size, machines, network.tree_latency, network.bandwidth))


def exposed_seconds(ranks: int, backward: float, work: Work, network: Network) -> float:
    """Seconds from the end of a backward pass of `backward` seconds to the end of the last all-reduce."""
    early = work.gradient_bytes - work.late_bytes
    count = max(1, round(early / BUCKET))
    buckets = [(backward * (i + 1) / count, early / count) for i in range(count)] if early else []
    through = 0.0
    for ready, size in [*buckets, (backward, work.late_bytes)]:
        if size:
            through = max(through, ready) + all_reduce_seconds(size, ranks, network)
    return max(0.0, through - backward)


def predict(ranks: int, work: Work, network: Network) -> dict[str, float]:
    """Seconds of a step, and its efficiency compared with a process that does not communicate."""
    exposed = exposed_seconds(ranks, work.backward, work, network) if ranks > 1 else 0.0
    step = work.computation + exposed
    return {
        "processes": ranks,
        "step_seconds": step,
        "exposed_seconds": exposed,
        "efficiency": work.computation / step,
        "without_overlap": work.computation / (work.computation + exposed_seconds(ranks, 0.0, work, network)),
    }


def check(measured: list[dict[str, Any]], work: Work, network: Network) -> list[dict[str, float]]:
    """Compare the prediction with rows of scaling.py on limited links; the row without a limit gives the computation.

    In that row a process also waits for the other one and for copies. This overlaps with the transfers on a slower
    link, so the longer of the two counts.
    """
    rows = []
    for row in measured:
        same = [r for r in measured if (r["processes"], r["variant"]) == (row["processes"], row["variant"])]
        free = [r for r in same if not r["link_mbit"]]
        if not row["link_mbit"] or not free or row["processes"] == 1:
            continue
        waiting = free[0]["step_seconds"] * free[0]["communication_share"]
        alone = replace(work, computation=free[0]["step_seconds"] - waiting)
        link = replace(network, bandwidth=GOODPUT * row["link_mbit"] * 1e6 / 8)
        step = alone.computation + max(waiting, exposed_seconds(row["processes"], alone.backward, alone, link))
        rows.append(
            {
                "processes": row["processes"],
                "link_mbit": row["link_mbit"],
                "predicted": step,
                "measured": row["step_seconds"],
                "error": step / row["step_seconds"] - 1,
            }
        )
    return rows


def table(rows: list[dict[str, float]]) -> str:
    """The rows as Markdown."""
    if rows and "error" in rows[0]:
        lines = ["| processes | link | predicted step (s) | measured step (s) | error |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {r['processes']} | {r['link_mbit']:g} Mbit/s | {r['predicted']:.3f} | {r['measured']:.3f} | "
            f"{r['error']:+.0%} |"
            for r in rows
        ]
    else:
        lines = ["| processes | step (s) | exposed (s) | efficiency | without overlap |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {r['processes']:,} | {r['step_seconds']:.4f} | {r['exposed_seconds']:.4f} | {r['efficiency']:.0%} | "
            f"{r['without_overlap']:.0%} |"
            for r in rows
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step_seconds", type=float, dest="computation", default=0.0, help="of one process alone")
    parser.add_argument("--measured", type=Path, help="a scaling.json to compare with the prediction")
    parser.add_argument("--gradient_bytes", type=float, required=True)
    parser.add_argument("--late_bytes", type=float)
    parser.add_argument("--micro_batches", type=int)
    parser.add_argument("--update", type=float)
    parser.add_argument("--bandwidth", type=float)
    parser.add_argument("--latency", type=float)
    parser.add_argument("--tree_latency", type=float)
    parser.add_argument("--ranks_per_machine", type=int)
    parser.add_argument("--machine_latency", type=float)
    parser.add_argument("--machine_bandwidth", type=float)
    given = parser.parse_args()
    work, network = (
        kind(**{f.name: value for f in fields(kind) if (value := getattr(given, f.name)) is not None})
        for kind in (Work, Network)
    )
    if given.measured:
        print(table(check(json.loads(given.measured.read_text()), work, network)))
    elif not work.computation or given.bandwidth is None:
        parser.error("a prediction needs --step_seconds and --bandwidth")
    else:
        print(table([predict(count, work, network) for count in COUNTS]))


if __name__ == "__main__":
    main()
