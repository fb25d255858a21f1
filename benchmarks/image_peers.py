"""The image recipe against a bare DDP loop over preloaded tensors, step by step: images per second on the digits.

    python benchmarks/image_peers.py --processes 2 --rounds 5 --output_dir out/image_peers

Both train the recipe's default ResNet, 256 images per update and as many of them per pass as a process has, with the
same fused SGD and clipping, in two threads of which one runs at a time: after each update the other one makes one. The
recipe is `main` of recipes/image_classification.py with its other default options. The bare loop indexes a float tensor
that is resized and normalized already; the recipe reads bytes and does that anew for each micro-batch. Two lanes:
neither augments; the recipe crops at random, each image its own box, and the bare loop shifts a whole batch by up to 2
pixels, which is less. A round's figure is the median of the ratios of the updates after the first ten. Leaves
images_cpu.json and images_cpu.md in the output folder.
"""

import gc
import os
import statistics
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_step
import rounds
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

LANES = ("plain", "augmented")
WARMUP = 10  # updates left out at the start
MOST_SHIFT = 2  # pixels of 16


def recipe_flags(lane: str, batch: int, processes: int) -> dict[str, object]:
    """What decides the run of a lane; the bare loop takes model and optimizer from it as well."""
    flags: dict[str, object] = {"global_batch_size": batch, "per_device_train_batch_size": batch // processes}
    return flags | ({"min_crop_area": 1} if lane == "plain" else {})


def words(flags: dict[str, object]) -> list[str]:
    """Flags as a command line has them."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def ours(lane: str, job: SimpleNamespace, round_: int) -> None:
    """The recipe as a user starts it."""
    from recipes import image_classification as recipe
    from shared.config import options

    flags = recipe_flags(lane, job.batch, dist.get_world_size()) | {
        "max_train_steps": job.steps + 1,
        "eval_steps": job.steps + 1,
        "checkpointing_steps": "no",
        "mixed_precision": "no",
        "seed": round_,
        "output_dir": f"{job.folder}/{lane}-{round_}",
    }
    recipe.main(options.parse(recipe.Config, words(flags)))


def bare(lane: str, job: SimpleNamespace, round_: int) -> None:
    """Plain PyTorch: tensors in memory, DDP as it comes, a new order for each epoch."""
    from recipes import image_classification as recipe
    from shared.config import options
    from shared.images.images import collate
    from shared.optimization.optimizers import make_optimizer

    rank, processes = dist.get_rank(), dist.get_world_size()
    config = options.parse(recipe.Config, words(recipe_flags(lane, job.batch, processes) | {"seed": round_}))
    train, _, _, augmentation = recipe.load_data(config)
    everything = collate([train[i] for i in range(len(train))])
    images, labels = augmentation.evaluation(everything), everything["labels"]  # float32 [N, 3, 16, 16], [N]
    inner = recipe.build_model(config, train.source.names)
    optimizer = make_optimizer(inner, config)
    model = nn.parallel.DistributedDataParallel(inner).train()
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(round_)
    batches: list[Tensor] = []
    while True:
        if not batches:
            batches = [*torch.randperm(len(images), generator=generator)[: -(len(images) % job.batch)].split(job.batch)]
        mine = batches.pop()[rank::processes]
        inputs = images[mine]
        if lane == "augmented":
            inputs = shifted(inputs, generator)
        F.cross_entropy(model(pixel_values=inputs).logits, labels[mine]).backward()
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """A batch moved by one draw of up to `MOST_SHIFT` pixels in each direction, the color of its edge behind it."""
    size = images.shape[-1]
    x, y = torch.randint(0, 2 * MOST_SHIFT + 1, (2,), generator=generator).tolist()
    return F.pad(images, [MOST_SHIFT] * 4, mode="replicate")[:, :, y : y + size, x : x + size]


LOOPS = {"ours": ours, "bare": bare}


def work(job: SimpleNamespace) -> list[dict[str, Any]]:
    """All rounds in one process of the launch: the rows of the report."""
    rows = []
    for round_ in range(job.rounds):
        for lane in LANES:
            calls = {name: partial(loop, lane, job, round_) for name, loop in LOOPS.items()}
            done = in_step.race(calls, job.steps, first=[*LOOPS][round_ % 2])
            timed = {name: loop.seconds[WARMUP:] for name, loop in done.items()}
            ratio = in_step.ratio(timed["bare"], timed["ours"])
            for name, seconds in timed.items():
                row = {"contestant": f"{name}, {lane}", "round": round_, "ratio": ratio}
                middle = statistics.median(seconds)
                rows.append(row | {"update_ms": 1000 * middle, "images_per_second": job.batch / middle})
            del done
            gc.collect()
    return rows


def main() -> None:
    parser = rounds.parser(__doc__, "out/image_peers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help=f"updates of each lane; the first {WARMUP} are left out")
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--job", type=Path, help="what a process of the launch is to do")
    arguments = parser.parse_args()
    if arguments.job:
        in_step.serve(arguments.job, work)
    if arguments.global_batch_size % arguments.processes or arguments.steps <= WARMUP:
        parser.error(f"--global_batch_size must be a multiple of --processes, --steps more than {WARMUP}")
    folder = rounds.fresh_folder(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    job = {"folder": str(folder), "batch": arguments.global_batch_size}
    job |= {name: getattr(arguments, name) for name in ("rounds", "steps")}
    rows = in_step.rows_of(__file__, arguments.processes, folder, job)
    found = {
        f"speed of ours / bare, {lane}": rounds.summary(
            [row["ratio"] for row in rows if row["contestant"] == f"ours, {lane}"]
        )
        for lane in LANES
    }
    rounds.save(arguments, "images_cpu", arguments.processes, rows, found)


if __name__ == "__main__":
    main()
