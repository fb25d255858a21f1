"""Measure recipes/image_classification.py beside a bare DDP loop over preloaded tensors: images per second.

    python benchmarks/image_peers.py --processes 2 --rounds 5 --output_dir out/image_peers

Both train the recipe's default ResNet on the digits, with 256 images per update, one micro-batch per process, and the
same fused SGD and clipping. They run in two threads that take turns: one update of one, then one of the other. The
recipe is `main` of recipes/image_classification.py with its default options otherwise. The bare loop indexes a float
tensor that is already resized and normalized; the recipe reads bytes, and resizes and normalizes each micro-batch.

There are two benchmarks. In "plain" neither augments. In "augmented" the recipe crops a random box from each image; the
bare loop shifts the whole batch by up to 2 pixels, which is less work. The figure of a round is the median of the
ratios of the updates after the first ten. Writes images_cpu.json and images_cpu.md into the output folder.
"""

import gc
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import alternating_loops, rounds
from benchmarks.harness.launching import flag_words

BENCHMARKS = ("plain", "augmented")
WARMUP = 10  # updates that are left out at the start
MOST_SHIFT = 2  # pixels, of 16


def recipe_flags(benchmark: str, batch: int, processes: int) -> dict[str, object]:
    """The recipe's flags in a benchmark; the bare loop takes its model and its optimizer from them, too."""
    flags: dict[str, object] = {"global_batch_size": batch, "per_device_train_batch_size": batch // processes}
    return flags | ({"min_crop_area": 1} if benchmark == "plain" else {})


def ours(benchmark: str, job: SimpleNamespace, round_: int) -> None:
    """Train with the recipe."""
    from recipes import image_classification as recipe
    from shared.config import options

    flags = recipe_flags(benchmark, job.batch, dist.get_world_size()) | {
        "max_train_steps": job.steps + 1,
        "eval_steps": job.steps + 1,
        "checkpointing_steps": "no",
        "mixed_precision": "no",
        "seed": round_,
        "output_dir": f"{job.folder}/{benchmark}-{round_}",
    }
    recipe.main(options.parse(recipe.Config, flag_words(flags)))


def bare(benchmark: str, job: SimpleNamespace, round_: int) -> None:
    """Train with plain PyTorch: tensors in memory, DDP with its defaults, a new order in each epoch."""
    from recipes import image_classification as recipe
    from shared.augmentation.resampling import whole
    from shared.config import options
    from shared.images.images import collate
    from shared.optimization.optimizers import make_optimizer

    rank, processes = dist.get_rank(), dist.get_world_size()
    config = options.parse(recipe.Config, flag_words(recipe_flags(benchmark, job.batch, processes) | {"seed": round_}))
    train, _, augmentation = recipe.load_data(config)
    everything = collate([train[i] for i in range(len(train))])
    scaled = augmentation.cut(everything["images"], whole(torch.device("cpu")))
    images, labels = augmentation.normalize(scaled), everything["labels"]  # float32 [N, 3, 16, 16], [N]
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
        if benchmark == "augmented":
            inputs = shifted(inputs, generator)
        F.cross_entropy(model(pixel_values=inputs).logits, labels[mine]).backward()
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """The batch, shifted at random by up to `MOST_SHIFT` pixels in each direction; the edge is repeated."""
    size = images.shape[-1]
    x, y = torch.randint(0, 2 * MOST_SHIFT + 1, (2,), generator=generator).tolist()
    return F.pad(images, [MOST_SHIFT] * 4, mode="replicate")[:, :, y : y + size, x : x + size]


LOOPS = {"ours": ours, "bare": bare}


def work(job: SimpleNamespace) -> list[dict[str, Any]]:
    """Run all rounds as one process of the launch; the rows of the report."""
    rows = []
    for round_ in range(job.rounds):
        for benchmark in BENCHMARKS:
            calls = {name: partial(loop, benchmark, job, round_) for name, loop in LOOPS.items()}
            done = alternating_loops.race(calls, job.steps, first=[*LOOPS][round_ % 2])
            timed = {name: loop.seconds[WARMUP:] for name, loop in done.items()}
            ratio = alternating_loops.ratio(timed["bare"], timed["ours"])
            for name, seconds in timed.items():
                row = {"contestant": f"{name}, {benchmark}", "round": round_, "ratio": ratio}
                middle = statistics.median(seconds)
                rows.append(row | {"update_ms": 1000 * middle, "images_per_second": job.batch / middle})
            del done
            gc.collect()
    return rows


def main() -> None:
    parser = rounds.parser(__doc__, "out/image_peers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=200, help=f"updates of each benchmark; the first {WARMUP} are left out"
    )
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--job", type=Path, help="file with the job of a process of the launch")
    arguments = parser.parse_args()
    if arguments.job:
        alternating_loops.serve(arguments.job, work)
    if arguments.global_batch_size % arguments.processes or arguments.steps <= WARMUP:
        parser.error(f"--global_batch_size must be a multiple of --processes, --steps more than {WARMUP}")
    folder = rounds.make_runs_folder(arguments.output_dir)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    job = {"folder": str(folder), "batch": arguments.global_batch_size}
    job |= {name: getattr(arguments, name) for name in ("rounds", "steps")}
    rows = alternating_loops.rows_of(__file__, arguments.processes, folder, job)
    found = {
        f"speed of ours / bare, {benchmark}": rounds.summary(
            [row["ratio"] for row in rows if row["contestant"] == f"ours, {benchmark}"]
        )
        for benchmark in BENCHMARKS
    }
    rounds.save(arguments, "images_cpu", arguments.processes, rows, found)


if __name__ == "__main__":
    main()
