"""Measure how fast several processes of a machine write a checkpoint together, beside one of them alone.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_shares.py --gigabytes 1.3 --rounds 5 --output_dir out/shares

The processes hold the same model and optimizer (DDP). "shared" is a save of a recipe, in which each process writes its
share of the large files. In "alone" the main process writes all of them, and "plain" is a plain write of the same bytes
by the main process (as `dd conv=fsync`). They take turns. The time of a save begins with the call and ends when all
files are on disk (fsync); it includes the copy to memory. Writers have the usual priority here. Each process needs
memory for the state, and the main process also for two copies. Writes checkpoint_shares.json and checkpoint_shares.md
into the output folder.
"""

import mmap
import os
import shutil
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.state_of_size import WIDTH, build
from shared.checkpoints import resuming, staging
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.plan.batches import Plan


def make_saver(accelerator: Any, folder: Path, alone: bool) -> Saver:
    """A saver that has saved once, so that its memory is laid out; `alone`: only the main process writes."""
    config = Options(output_dir=str(folder), save_total_limit=None, checkpointing_steps="no")
    saver = Saver(accelerator, config, Plan(num_samples=10**6, seed=0, global_batch_size=1, num_epochs=1))
    only_main = [0] if accelerator.is_main_process else []
    with mock.patch.object(staging, "partners", return_value=only_main) if alone else nullcontext():
        save(saver, 1)
    if saver.staging.writer:
        with suppress(PermissionError):  # at a low priority it would measure how busy the machine is
            os.setpriority(os.PRIO_PROCESS, saver.staging.writer.process.pid, 0)
    return saver


def save(saver: Saver, step: int) -> None:
    """Save, and wait until the checkpoint is on disk."""
    saver.save(Progress(step=step), {})
    saver._look(wait=True)
    assert saver.problem is None, saver.problem


def write_plainly(contents: dict[str, memoryview], folder: Path) -> None:
    """Write files, each with fsync, as `dd conv=fsync` does."""
    for name, content in contents.items():
        with (folder / name).open("wb", buffering=0) as file:
            for start in range(0, len(content), 1 << 20):
                file.write(content[start : start + (1 << 20)])
            os.fsync(file.fileno())


def main() -> None:
    parser = rounds.parser(__doc__, "out/checkpoint_shares")
    parser.add_argument("--gigabytes", type=float, default=1.3, help="size of the state")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    accelerator, model, optimizer = build(arguments.gigabytes)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    folder = arguments.output_dir.resolve() / "files"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("shared", "alone", "plain"):
            (folder / name).mkdir(parents=True)
    dist.barrier()
    savers = {name: make_saver(accelerator, folder / name, name == "alone") for name in ("shared", "alone")}
    assert savers["shared"].staging.writer, "the state is too small to be shared by so many processes"
    images = savers["alone"].staging.buffers.images if accelerator.is_main_process else {}  # type: ignore[union-attr]
    contents = {name: memoryview(mmap.mmap(image.descriptor, image.size)) for name, image in images.items()}
    size = sum(map(len, contents.values()))

    def timed(name: str, round_: int) -> rounds.Row:
        if accelerator.is_main_process:
            old = [path for way in savers for path in resuming.complete(folder / way).values()]
            for path in (*old, *(folder / "plain").iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()
        started = time.perf_counter()
        if name in savers:
            save(savers[name], round_ + 2)
        elif accelerator.is_main_process:
            write_plainly(contents, folder / "plain")
        dist.barrier()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "gigabytes_per_second": size / 1e9 / seconds}

    rows = rounds.take_turns_in_group(["shared", "alone", "plain"], arguments.rounds, timed)
    for saver in savers.values():
        saver.staging.close()
    if rows:
        pairs = (("shared", "alone"), ("shared", "plain"), ("alone", "plain"))
        found = {f"speed, {a} / {b}": rounds.compare(rows, "gigabytes_per_second", a, b) for a, b in pairs}
        rounds.save(arguments, "checkpoint_shares", accelerator.num_processes, rows, found)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
