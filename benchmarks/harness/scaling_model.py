"""A model of data-parallel training on many processes: the time of an all-reduce and of a step.

Each process computes the same amount per step (weak scaling). The backward pass of the last micro-batch takes two
thirds of its time and makes gradients at a constant rate, in buckets of 25 MiB. The all-reduce of a bucket starts when
the bucket is full and the all-reduce before has ended; it does not slow down the computation. `late_bytes` come with
the last gradient, such as an embedding's, and overlap with nothing. The model leaves out slower processes, congestion
and the input of data, so it is an upper bound of the speed.
"""

import math
from dataclasses import dataclass

BUCKET = 25 * 2**20  # bytes: DDP's default
BACKWARD = 2 / 3  # of a micro-batch's computation: two of three matrix products
TREE_SHARE = 0.9  # of a ring's bandwidth that a tree reaches: NCCL's own model, github.com/NVIDIA/nccl, tuning.cc
COUNTS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]  # processes of a table


@dataclass(frozen=True)
class Network:
    """The links that an all-reduce uses, in seconds and bytes per second."""

    bandwidth: float
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
    efficiency = work.computation / step
    return {"processes": ranks, "step_seconds": step, "exposed_seconds": exposed, "efficiency": efficiency}
