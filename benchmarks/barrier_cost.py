"""Measure what two processes lose when they wait for each other after every step: the control of independent_runs.py.

    torchrun --nproc-per-node 2 benchmarks/barrier_cost.py --rounds 5 --output_dir out/barrier_cost

Both processes multiply matrices, in steps of a few seconds with equally many products. In one turn they wait for each
other after every step, as processes of a run do; in the next turn they never wait. They send nothing. On cores that are
always equally fast the ratio of the two rates is 1. Where it is less, the two processes of independent_runs.py lose as
much. Writes barrier_cost.json and barrier_cost.md into the output folder.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds

SIDE = 512  # of the square matrices, in float32
PRODUCTS = 1200  # per step: 3 to 4 s on a core that does 90 GFLOP/s


def main() -> None:
    parser = rounds.parser(__doc__, "out/barrier_cost")
    parser.add_argument("--steps", type=int, default=6, help="steps of each turn")
    parser.add_argument("--products", type=int, default=PRODUCTS, help="matrix products of each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    matrix = torch.rand(SIDE, SIDE)

    def timed(name: str, _: int) -> rounds.Row:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(arguments.steps):
            for _ in range(arguments.products):
                matrix @ matrix
            if name == "waiting":
                dist.barrier()
        rate = torch.tensor(arguments.steps * arguments.products / (time.perf_counter() - started))
        dist.all_reduce(rate)
        return {"products_per_second": float(rate)}

    if rows := rounds.take_turns_in_group(["waiting", "never waiting"], arguments.rounds, timed):
        found = {"waiting / never waiting": rounds.compare(rows, "products_per_second", "waiting", "never waiting")}
        rounds.save(arguments, "barrier_cost", 2, rows, found)


if __name__ == "__main__":
    main()
