"""The image recipe against a bare DDP loop over preloaded tensors, side by side: images per second on the digits.

    python benchmarks/image_peers.py --processes 2 --rounds 7 --output_dir out/image_peers

Both train the recipe's default ResNet, 256 images per update and as many of them per pass as a process has, with the
same fused SGD and clipping, each in a launch of its own, in turns. The bare loop indexes a float tensor that is resized
and normalized already; the recipe reads bytes and does that anew for each micro-batch. Two lanes: neither augments; the
recipe crops at random, each image its own box, and the bare loop shifts a whole batch by up to 2 pixels, which is less.
Start-up and the first ten updates do not count. Leaves images_cpu.json and images_cpu.md in the output folder.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import rounds
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
LABELS = {
    "ours": "recipes/image_classification.py, `--min_crop_area 1`",
    "bare": "bare DDP, preloaded",
    "ours_augmented": "recipes/image_classification.py, a crop for each image",
    "bare_augmented": "bare DDP, preloaded, a shift for each batch",
}
PAIRS = (("ours", "bare"), ("ours_augmented", "bare_augmented"))
RATE = "samples_per_second"
WARMUP = 10  # updates left out at the start: one reading of the recipe's figures
MOST_SHIFT = 2  # pixels of 16


def recipe_flags(name: str, batch: int, processes: int) -> dict[str, object]:
    """What decides the run of a contestant of this name; the bare loop takes model and optimizer from it as well."""
    flags: dict[str, object] = {"global_batch_size": batch, "per_device_train_batch_size": batch // processes}
    return flags | ({} if name.endswith("_augmented") else {"min_crop_area": 1})


def words(flags: dict[str, object]) -> list[str]:
    """Flags as a command line has them."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def bare(job: SimpleNamespace) -> dict[str, float]:
    """One process of plain PyTorch: tensors in memory, DDP as it comes, a new order for each epoch."""
    from recipes import image_classification as recipe
    from shared import options
    from shared.datasets.images import collate
    from shared.optimization import make_optimizer

    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    flags = recipe_flags(job.contestant, job.batch, processes) | {"seed": job.seed}
    config = options.parse(recipe.Config, words(flags))
    train, _, _, augmentation = recipe.load_data(config)
    everything = collate([train[i] for i in range(len(train))])
    images, labels = augmentation.evaluation(everything), everything["labels"]  # float32 [N, 3, 16, 16], [N]
    inner = recipe.build_model(config, train.source.names)
    optimizer = make_optimizer(inner, config)
    model = nn.parallel.DistributedDataParallel(inner).train()
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(job.seed)
    batches: list[Tensor] = []
    for step in range(WARMUP + job.steps):
        if step == WARMUP:
            started = time.perf_counter()
        if not batches:
            batches = [*torch.randperm(len(images), generator=generator)[: -(len(images) % job.batch)].split(job.batch)]
        mine = batches.pop()[rank::processes]
        inputs = images[mine]
        if job.contestant == "bare_augmented":
            inputs = shifted(inputs, generator)
        F.cross_entropy(model(pixel_values=inputs).logits, labels[mine]).backward()
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - started
    return {RATE: job.steps * job.batch / seconds, "seconds": seconds}


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """A batch moved by one draw of up to `MOST_SHIFT` pixels in each direction, the color of its edge behind it."""
    size = images.shape[-1]
    x, y = torch.randint(0, 2 * MOST_SHIFT + 1, (2,), generator=generator).tolist()
    return F.pad(images, [MOST_SHIFT] * 4, mode="replicate")[:, :, y : y + size, x : x + size]


def race(arguments: argparse.Namespace, folder: Path, name: str, round_: int) -> dict[str, Any]:
    """One contestant's row of one round."""
    log, result, output = folder / f"{name}-{round_}.log", folder / f"{name}-{round_}.json", folder / f"{name}-{round_}"
    if name.startswith("bare"):
        job = {"contestant": name, "seed": round_, "steps": arguments.steps, "batch": arguments.global_batch_size}
        result.with_suffix(".job").write_text(json.dumps(job | {"result": str(result)}))
        memory = peers.launch(arguments.processes, log, __file__, "--job", result.with_suffix(".job"))
        row = json.loads(result.read_text())
    else:
        flags = recipe_flags(name, arguments.global_batch_size, arguments.processes) | {
            "max_train_steps": WARMUP + arguments.steps,
            "logging_steps": WARMUP,
            "eval_steps": WARMUP + arguments.steps,
            "checkpointing_steps": "no",
            "mixed_precision": "no",
            "seed": round_,
            "expect_processes": arguments.processes,
            "output_dir": output,
        }
        script = ROOT / "recipes/image_classification.py"
        memory = peers.launch(arguments.processes, log, script, *words(flags))
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        timed = [line for line in lines if "loss" in line][1:]
        assert len(timed) * WARMUP == arguments.steps
        seconds = sum(WARMUP * arguments.global_batch_size / line[RATE] for line in timed)
        row = {RATE: arguments.steps * arguments.global_batch_size / seconds, "seconds": seconds}
    return {"contestant": name, "round": round_, **row, "peak_rss_mib": memory}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    at, settings = report["machine"], report["settings"]
    lines = [
        f"{at['cpu']}, {at['cores_used']} of {at['cores']} cores, one thread per process; torch "
        f"{at['versions']['torch']}, transformers {at['versions']['transformers']}, accelerate "
        f"{at['versions']['accelerate']}; {at['date'][:10]}.",
        "",
        f"{settings['processes']} processes, fp32, {settings['global_batch_size']} digits per update, "
        f"{settings['steps']} updates timed, {settings['rounds']} rounds in turns; medians.",
        "",
        "| contestant | images/s | ms per update | peak memory per process | recipe against it (min-max) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["contestant"] for row in report["rows"]):
        mine = [row for row in report["rows"] if row["contestant"] == name]
        rate, seconds, memory = (statistics.median(row[k] for row in mine) for k in (RATE, "seconds", "peak_rss_mib"))
        each = report["ratios"].get(name)
        faster = f"{statistics.median(each):.3f} ({min(each):.3f}-{max(each):.3f})" if each else ""
        each_update = f"{1000 * seconds / settings['steps']:.2f}"
        lines.append(f"| {LABELS[name]} | {rate:,.0f} | {each_update} | {memory:,.0f} MiB | {faster} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help="timed updates per launch, a multiple of ten")
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--contestants", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--output_dir", type=Path, default=Path("out/image_peers"))
    parser.add_argument("--job", type=Path, help="what a process of the bare loop's launch is to do")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.job:
        job = SimpleNamespace(**json.loads(arguments.job.read_text()))
        result = bare(job)
        if dist.get_rank() == 0:
            Path(job.result).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        return
    if arguments.steps % WARMUP or arguments.global_batch_size % arguments.processes:
        parser.error(f"--steps must be a multiple of {WARMUP}, --global_batch_size one of --processes")
    folder = arguments.output_dir.resolve() / "runs"
    if folder.exists():
        parser.error(f"{folder} exists: name a fresh --output_dir")
    folder.mkdir(parents=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    report: dict[str, Any] = {"machine": rounds.machine(arguments.processes), "settings": settings, "rows": []}
    for round_, name in rounds.turns(arguments.contestants, arguments.rounds):
        row = race(arguments, folder, name, round_)
        report["rows"].append(row)
        print(f"round {round_} {name:14} {row[RATE]:8,.0f} images/s", flush=True)
        ratios = {other: rounds.by_round(report["rows"], one, other, RATE) for one, other in PAIRS}
        report["ratios"] = {name: each for name, each in ratios.items() if each}
        (arguments.output_dir / "images_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output_dir / "images_cpu.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
