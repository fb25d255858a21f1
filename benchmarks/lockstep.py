"""What a machine takes from two processes that wait for each other, whatever they compute: the control of a lane.

    torchrun --nproc-per-node 2 benchmarks/lockstep.py --rounds 5 --output_dir out/lockstep

Both multiply matrices, in steps of some seconds, as many products in each. In turns they wait for each other after
every step, as processes of a run do, and never. Nothing is sent, and all steps are alike: with cores that are always
equally fast the ratio is 1, and what it falls short of that, independent.py's two processes lose as well. Leaves
lockstep.json and lockstep.md in the output folder.
"""

import time

import rounds
import torch
import torch.distributed as dist

SIDE = 512  # of the square matrices, in float32
PRODUCTS = 1200  # of a step: 3 to 4 s of a core that does 90 GFLOP/s


def main() -> None:
    parser = rounds.parser(__doc__, "out/lockstep")
    parser.add_argument("--steps", type=int, default=6, help="of each turn")
    parser.add_argument("--products", type=int, default=PRODUCTS, help="of each step")
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
            if name == "in step":
                dist.barrier()
        rate = torch.tensor(arguments.steps * arguments.products / (time.perf_counter() - started))
        dist.all_reduce(rate)
        return {"products_per_second": float(rate)}

    if rows := rounds.take_turns_in_group(["in step", "alone"], arguments.rounds, timed):
        found = {"in step / alone": rounds.compare(rows, "products_per_second", "in step", "alone")}
        rounds.save(arguments, "lockstep", 2, rows, found)


if __name__ == "__main__":
    main()
