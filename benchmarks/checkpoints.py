"""Measure what saving a checkpoint costs the training loop, beside other ways to save: stall, CPU, reading, recovery.

    python benchmarks/checkpoints.py --rounds 15 --output_dir out/checkpoints

All ways save the same BERT (4 layers x 256) and fused AdamW, in one process. They take turns, in a random order in each
round, with a training step before each save and one after it. Before each timing the script waits until all background
work has ended, so that no way slows down another. "stall" is how long the loop stands still: in the call, and while the
next update waits for the copy. "extra" is how much later the next step ends than without a save in the same round: it
also includes what background work takes from the step. With `taskset -c 0` one core does everything. Writes
checkpoints_cpu.json into the output folder; on a GPU checkpoints_gpu.json.

On a GPU (or with `--encoder base`) the encoder is BERT-base, 1.31 GB with its optimizer; "extra" is then the cost that
counts, because the host does not wait for the copy. A save that is due before the last one is complete waits for the
disk on top of that: at most "until_complete".

    python benchmarks/checkpoints.py --gigabytes 1.3 4 --rounds 5 --output_dir out/large

measures only how fast states of these sizes are written and read. Writing ends when the files are on disk (fsync). It
is measured beside a plain write of the same bytes (as `dd conv=fsync`; "direct" as `dd oflag=direct conv=fsync
bs=16M`), torch.save, safetensors and torch.distributed.checkpoint. Our writer has the usual priority here. Each
loading, ours with the digests verified, takes place in a new process, from the disk: the page cache has none of the
files ("cold"), or from the page cache, which has all of them ("warm"). --contestants names some of these ways.

The script needs about three times the size in free memory: writing happens in a process that holds the state, our copy
of it and the bytes of the plain writes, and ends before the loading begins. Loading needs the state, and room for its
files in the page cache. On the disk it needs as much. A size without room is "not measured" in the output, with the
reason. safetensors needs 3.8 times the size in memory; --contestants can leave it out.
Writes checkpoints_large_cpu.json.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.encoder_and_texts import SIZES
from benchmarks.harness.launching import ROOT
from benchmarks.harness.state_of_size import build

SHORT = 32  # tokens per row in the steps around a save: the cost of a save would be lost in the noise of longer steps
WRITERS = ("ours", "plain", "direct", "torch_save", "safetensors", "distributed")
READERS = ("ours", "verifying", "load_state")
ROOM = 3.1  # what --gigabytes needs, in memory and on the disk, divided by the size
LABELS = {
    "nothing": "no save",
    "copy": "plain copy of the same bytes into memory",
    "ours": "Saver.save",
    "save_state": "accelerator.save_state",
    "async_save": "torch.distributed.checkpoint.async_save",
}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def cpu_of_saving() -> float:
    """CPU seconds of the threads that copy and write for `Saver.save`."""
    names = ("checkpoint", "writer")
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(names)]
    return sum(int(Path(f"/proc/{thread}/schedstat").read_text().split()[0]) / 1e9 for thread in threads)


def start_group(folder: Path) -> None:
    """A process group of this process alone, which torch.distributed.checkpoint needs."""
    import torch

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=0, world_size=1)


def measure_saves(folder: Path, encoder: str, number: int) -> dict[str, float]:
    """Measure `number` saves that are due when the last one is done, beside a copy of the same bytes into memory.

    Returns:
        Medians in milliseconds. `save_extra_ms` and `copy_extra_ms`: how much later the next step ends.
        `save_stall_ms`: how long the loop stands still. `save_on_disk_ms`: from the start of the save until it is on
        disk; a save that is due earlier waits for the rest of this time. `save_bytes`: the size.
    """
    ways = ["nothing", "copy", "ours"]
    arguments = argparse.Namespace(encoder=encoder, rounds=number, global_batch_size=8, ways=ways)
    measured = measure_stall(arguments, folder)
    medians = summarize(measured)
    return {
        "save_bytes": measured["megabytes"] * 1e6,
        "save_stall_ms": medians["median_stall_ms"]["ours"],
        "save_extra_ms": medians["median_extra_ms"]["ours"],
        "copy_extra_ms": medians["median_extra_ms"]["copy"],
        "save_on_disk_ms": medians["median_until_complete_ms"],
    }


def measure_stall(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the ways of saving that `arguments.ways` names, in turns.

    Returns:
        A row for each save, CPU seconds of a training step, and, if all ways are measured, seconds of reading.
    """
    import torch
    import transformers
    from accelerate import Accelerator
    from torch.distributed import checkpoint

    from shared.checkpoints import resuming
    from shared.checkpoints.progress import Progress
    from shared.checkpoints.saving import Saver
    from shared.checkpoints.states import distinct, state_tensors
    from shared.config.options import Options
    from shared.optimization.optimizers import inner, make_optimizer
    from shared.plan.batches import Plan

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    everything = arguments.ways == [*LABELS]
    if everything:
        start_group(folder)
    accelerator = Accelerator(cpu=not on_gpu)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    sizes = SIZES if arguments.encoder == "small" else {}
    torch.manual_seed(0)
    config = Options(output_dir=str(folder / "ours"), save_total_limit=1, global_batch_size=arguments.global_batch_size)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=8192 if sizes else 30522, **sizes)
    )
    model, optimizer = accelerator.prepare(model, make_optimizer(model, config))
    (folder / "ours").mkdir()
    plan = Plan(num_samples=10**6, seed=0, global_batch_size=config.global_batch_size, num_epochs=1)
    saver = Saver(accelerator, config, plan)
    progress = Progress()

    def train(steps: int, samples: int, tokens: int = 231) -> None:
        """Make steps on random tokens; the default is the mean length of the recipe's docstrings."""
        for _ in range(steps):
            for _ in range(samples // 8):
                ids = torch.randint(8192, (8, tokens), device=accelerator.device)
                model(ids, labels=ids.new_zeros(8)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def tensors() -> list[torch.Tensor]:
        return [*distinct(model.state_dict()).values(), *state_tensors(inner(optimizer))]

    train(1, 8)
    places = [torch.empty_like(tensor, device="cpu", pin_memory=on_gpu) for tensor in tensors()]
    pending: list[Any] = []

    def plain_copy(_: int) -> None:
        for place, tensor in zip(places, tensors(), strict=True):
            place.copy_(tensor, non_blocking=on_gpu)
        synchronize()

    def ours(step: int) -> None:
        progress.step = step
        saver.save(progress, {})

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner(optimizer).state_dict()}

    def async_save(step: int) -> None:
        pending.append(checkpoint.async_save(state(), checkpoint_id=folder / f"async-{step}"))

    waited = [0.0]

    def timed_wait(wait: Callable[[], None] = saver._before_update) -> None:
        started = time.perf_counter()
        wait()
        waited[0] += time.perf_counter() - started

    saver._before_update = timed_wait  # type: ignore[method-assign]

    ways: dict[str, Callable[[int], object]] = {
        "nothing": lambda step: None,
        "copy": plain_copy,
        "ours": ours,
        "save_state": lambda step: accelerator.save_state(str(folder / f"state-{step}")),
        "async_save": async_save,
    }

    def drain() -> None:
        saver.poll(wait=True)
        while pending:
            pending.pop().result()
        for path in folder.iterdir():
            if path.name.startswith(("async-", "state-")):
                shutil.rmtree(path)

    rows, step = [], 0
    for round_ in range(-2, arguments.rounds):  # two warm up
        for way in random.Random(round_).sample(sorted(arguments.ways), len(arguments.ways)):
            train(1, 8, SHORT)
            drain()
            synchronize()
            step += 1
            before = cpu_seconds(), cpu_of_saving()
            started = time.perf_counter()
            ways[way](step)
            called = time.perf_counter() - started
            stall_cpu = cpu_seconds() - before[0]
            waited[0] = 0.0
            train(1, 8, SHORT)
            synchronize()
            through_next_step = time.perf_counter() - started
            stall = called + waited[0]
            drain()
            whole = time.perf_counter() - started
            background = cpu_of_saving() - before[1] if way == "ours" else None
            if round_ >= 0:
                rows.append(
                    {
                        "way": way,
                        "round": round_,
                        "stall": stall,
                        "through_next_step": through_next_step,
                        "stall_cpu": stall_cpu,
                        "background_cpu": background,
                        "until_complete": whole,
                    }
                )
    drain()
    before_steps = cpu_seconds()
    train(2, config.global_batch_size)
    cpu_of_a_step = (cpu_seconds() - before_steps) / 2
    ours(step + 1)
    saver.finish()
    result = {
        "device": str(accelerator.device),
        "megabytes": sum(tensor.nbytes for tensor in tensors()) / 1e6,
        "rows": rows,
        "cpu_seconds_of_a_step": cpu_of_a_step,
    }
    if not everything:
        accelerator.free_memory()
        return result
    accelerator.save_state(str(folder / "kept"))
    checkpoint.save(state(), checkpoint_id=folder / "kept_shards")
    path = resuming.path_of(config.output_dir, step + 1)
    readers: dict[str, Callable[[], object]] = {
        "ours": lambda: (resuming.problem_with(path), resuming.load(accelerator, path)),  # checks the digests first
        "load_state": lambda: accelerator.load_state(str(folder / "kept")),
        "distributed": lambda: checkpoint.load(state(), checkpoint_id=folder / "kept_shards"),
    }
    reads: dict[str, list[float]] = {reader: [] for reader in readers}
    for round_ in range(-1, arguments.rounds):
        for reader in random.Random(round_).sample(sorted(readers), len(readers)):
            started = time.perf_counter()
            readers[reader]()
            if round_ >= 0:
                reads[reader].append(time.perf_counter() - started)
    accelerator.free_memory()
    torch.distributed.destroy_process_group()
    return result | {"read_seconds": reads}


def summarize(stall: dict[str, Any]) -> dict[str, Any]:
    """The medians, and the ratios of ours to the other ways within each round."""
    found = {row["way"] for row in stall["rows"]}
    by_way = {way: [row for row in stall["rows"] if row["way"] == way] for way in LABELS if way in found}
    alone = [row["through_next_step"] for row in by_way["nothing"]]
    figures = {
        "stall": {way: [row["stall"] for row in rows] for way, rows in by_way.items()},
        "extra": {
            way: [row["through_next_step"] - step for row, step in zip(rows, alone, strict=True)]
            for way, rows in by_way.items()
        },
        "stall_cpu": {way: [row["stall_cpu"] for row in rows] for way, rows in by_way.items()},
    }
    others = [way for way in by_way if way not in ("nothing", "ours")]
    ratios = {
        way: [mine / other for mine, other in zip(figures["stall"]["ours"], figures["stall"][way], strict=True)]
        for way in others
    }
    cpu = [row["stall_cpu"] + row["background_cpu"] for row in by_way["ours"]]
    medians = {
        name: {way: round(1e3 * statistics.median(times), 2) for way, times in of_way.items()}
        for name, of_way in figures.items()
    }
    return {
        "median_stall_ms": medians["stall"],
        "ours_against": {
            way: {name: round(f(values), 3) for name, f in (("median", statistics.median), ("min", min), ("max", max))}
            for way, values in ratios.items()
        },
        "step_ms": round(1e3 * statistics.median(alone), 1),
        "median_extra_ms": medians["extra"],
        "extra_of_ours_against": {
            way: round(medians["extra"]["ours"] / medians["extra"][way], 3)
            for way in others
            if medians["extra"][way] > 0
        },
        "median_stall_cpu_ms": medians["stall_cpu"],
        "median_until_complete_ms": round(1e3 * statistics.median(row["until_complete"] for row in by_way["ours"]), 1),
        "median_read_ms": {
            way: round(1e3 * statistics.median(times), 1) for way, times in stall.get("read_seconds", {}).items()
        },
        "cpu_seconds_per_save": round(statistics.median(cpu), 4),
        "share_of_ten_steps": round(statistics.median(cpu) / (10 * stall["cpu_seconds_of_a_step"]), 5),
    }


def time_of_reading(way: str, gigabytes: float, folder: Path) -> dict[str, float]:
    """Load what `measure_writing` has saved in one way, in a process that has not loaded anything before."""
    from shared.checkpoints import resuming

    accelerator, *_ = build(gigabytes)
    (path,) = resuming.complete(folder / "ours").values()

    readers: dict[str, Callable[[], object]] = {
        "ours": lambda: (resuming.problem_with(path), resuming.load(accelerator, path)),
        "verifying": lambda: resuming.problem_with(path),
        "load_state": lambda: accelerator.load_state(str(folder / "kept")),
    }
    started, started_cpu = time.perf_counter(), time.process_time()
    readers[way]()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - started_cpu}


def measure_writing(arguments: argparse.Namespace, folder: Path, gigabytes: float) -> dict[str, Any]:
    """Write a state of one size in each way, in turns, in a process that then ends: a row for each, and the bytes.

    In `folder`, one of our checkpoints is left in "ours", and one of `save_state` in "kept" if it is to be read.
    """
    import torch
    from safetensors.torch import save_file
    from torch.distributed import checkpoint

    from shared.checkpoints import resuming
    from shared.checkpoints.progress import Progress
    from shared.checkpoints.saving import Saver
    from shared.config.options import Options
    from shared.disk import sync
    from shared.optimization.optimizers import inner
    from shared.plan.batches import Plan

    start_group(folder)
    accelerator, model, optimizer = build(gigabytes)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    config = Options(output_dir=str(folder / "ours"), save_total_limit=None, checkpointing_steps="no")
    (folder / "ours").mkdir()
    saver = Saver(accelerator, config, Plan(num_samples=10**6, seed=0, global_batch_size=1, num_epochs=1))
    progress = Progress()
    new = folder / "new"

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner(optimizer).state_dict()}

    def tensors_of(part: Any) -> list[torch.Tensor]:
        if isinstance(part, dict):
            return [tensor for value in part.values() for tensor in tensors_of(value)]
        return [part] if isinstance(part, torch.Tensor) else []

    def ours() -> None:
        progress.step += 1
        saver.save(progress, {})
        saver.poll(wait=True)
        assert saver.problem is None

    def plain() -> None:
        """What `dd conv=fsync` does, with the bytes of our files."""
        for name, content in mapped.items():
            with (new / name).open("wb", buffering=0) as file:
                for start in range(0, len(content), 1 << 20):
                    file.write(content[start : start + (1 << 20)])
                os.fsync(file.fileno())

    def direct() -> None:
        """What `dd oflag=direct conv=fsync bs=16M` does, with the bytes of our files."""
        step = 1 << 24
        for name, content in mapped.items():
            end = len(content) // 4096 * 4096
            with (new / name).open("wb", buffering=0) as file:
                descriptor = os.open(new / name, os.O_WRONLY | os.O_DIRECT)
                for start in range(0, end, step):
                    os.pwrite(descriptor, content[start : min(start + step, end)], start)
                os.close(descriptor)
                os.pwrite(file.fileno(), content[end:], end)
                os.fsync(file.fileno())

    def torch_save() -> None:
        for name, part in state().items():
            torch.save(part, new / name)
            sync(new / name)

    def safetensors() -> None:
        for name, part in state().items():
            save_file({str(i): tensor for i, tensor in enumerate(tensors_of(part))}, new / name)
            sync(new / name)

    writers: dict[str, Callable[[], object]] = {
        "ours": ours,
        "plain": plain,
        "direct": direct,
        "torch_save": torch_save,
        "safetensors": safetensors,
        "distributed": lambda: checkpoint.save(state(), checkpoint_id=new),
    }
    ours()  # lays out the memory, and starts the writer
    for thread in threading.enumerate():
        if thread.name.startswith("writer") and thread.native_id:
            with suppress(PermissionError):  # at a low priority it would measure how busy the machine is
                os.setpriority(os.PRIO_PROCESS, thread.native_id, 0)
    assert saver.staging, "not enough memory"
    (written,) = resuming.complete(folder / "ours").values()
    files = sorted(written.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    mapped = {file.name: memoryview(mmap.mmap(-1, file.stat().st_size)) for file in files}  # aligned, for "direct"
    for file in files:
        with file.open("rb") as opened:
            opened.readinto(mapped[file.name])
    for content in mapped.values():
        zlib.crc32(content)  # the first pass over a mapping is slow, and no part of a plain write

    def write(way: str, _: int) -> dict[str, float]:
        for before in (new, *resuming.complete(folder / "ours").values()):  # no part of the time of any way
            shutil.rmtree(before, ignore_errors=True)
        new.mkdir()
        plain()  # so that all ways find free memory that the machine has used before
        shutil.rmtree(new)
        new.mkdir()
        os.sync()
        started = time.perf_counter()
        writers[way]()
        return {"seconds": time.perf_counter() - started}

    rows = rounds.take_turns(chosen(WRITERS, arguments), arguments.rounds, write)
    shutil.rmtree(new)
    if not resuming.complete(folder / "ours"):
        ours()
    saver.finish()
    if "load_state" in chosen(READERS, arguments):
        accelerator.save_state(str(folder / "kept"))
    os.sync()
    torch.distributed.destroy_process_group()
    (folder / "store").unlink(missing_ok=True)
    return {"bytes": size, "rows": rows}


def measure_throughput(arguments: argparse.Namespace, folder: Path, gigabytes: float) -> dict[str, Any]:
    """Write and read a state of one size in each way, in turns: a row for each, and the ratios of the speeds."""
    spawn = multiprocessing.get_context("spawn")

    def in_new_process(function: Callable[..., Any], *words: Any) -> Any:
        with ProcessPoolExecutor(1, spawn) as process:
            return process.submit(function, *words).result()

    def read(way: str, _: int) -> dict[str, float]:
        way, cache = way.split()
        mine = folder / ("kept" if way == "load_state" else "ours")
        for file in (file for kept in (folder / "ours", folder / "kept") for file in kept.rglob("*")):
            if file.is_file():
                with file.open("rb", buffering=0) as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    while cache == "warm" and file.is_relative_to(mine) and opened.read(1 << 24):
                        pass
        return in_new_process(time_of_reading, way, gigabytes, folder)

    if problem := lack_of_room(folder, gigabytes):
        print(f"{gigabytes:g} GB: not measured: {problem}", flush=True)
        return {"gigabytes": gigabytes, "not_measured": problem}
    written = in_new_process(measure_writing, arguments, folder, gigabytes)
    size, write_rows = written["bytes"], written["rows"]
    readers = chosen(READERS, arguments)
    ways = [f"{way} {cache}" for cache in ("cold", "warm") for way in readers]
    read_rows = rounds.take_turns(ways, arguments.rounds, read)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)

    def figures(rows: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> dict[str, Any]:
        """Speeds, and ours divided by each other one, by round."""
        ways = list(dict.fromkeys(row["contestant"] for row in rows))
        seconds = {way: statistics.median(row["seconds"] for row in rows if row["contestant"] == way) for way in ways}
        return {
            "median_gigabytes_per_second": {way: round(size / 1e9 / seconds[way], 3) for way in ways},
            "speed_of_ours_against": {other: rounds.compare(rows, "seconds", other, one) for one, other in pairs},
            "rows": rows,
        }

    writing = figures(write_rows, [("ours", way) for way in chosen(WRITERS, arguments) if way != "ours"])
    caches = ("cold", "warm") if "load_state" in readers else ()
    reading = figures(read_rows, [(f"ours {cache}", f"load_state {cache}") for cache in caches])
    return {"gigabytes": size / 1e9, "writing": writing, "reading": reading}


def chosen(ways: tuple[str, ...], arguments: argparse.Namespace) -> list[str]:
    """Those of `ways` that --contestants names, and ours."""
    return [way for way in ways if way == "ours" or way in arguments.contestants]


def lack_of_room(folder: Path, gigabytes: float) -> str:
    """Why a state of this size cannot be measured if it needs `ROOM` times its size, or ""."""
    from shared.checkpoints.staging import available_memory

    needed = ROOM * gigabytes
    for what, free in (("memory", available_memory()), ("disk space", shutil.disk_usage(folder).free)):
        if free < needed * 1e9:
            return f"{needed:.1f} GB of {what} are needed, and {free / 1e9:.1f} GB are free"
    return ""


def measure_recovery(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Kill a run of the recipe with SIGKILL and start it again: seconds until it makes a step, and until a new step."""
    from shared.checkpoints.resuming import complete

    rows = []
    for round_ in range(arguments.recoveries):
        output = folder / f"recovery-{round_}"
        metrics = output / "metrics.jsonl"
        words = ["recipes/nlp.py", "--max_train_steps", "100000", "--checkpointing_steps", "20", "--logging_steps", "1"]
        command = [sys.executable, *words, "--eval_steps", "100000", "--output_dir", str(output)]

        def start(log: Path = folder / "recovery.log") -> subprocess.Popen:
            with log.open("a") as file:
                return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)  # noqa: B023

        def last_step(metrics: Path = metrics) -> int:
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            return json.loads(whole[-1])["step"] if whole else 0

        def kill(process: subprocess.Popen) -> float:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return time.perf_counter()

        process = start()
        while last_step() < 50:
            time.sleep(0.02)
        killed = kill(process)
        reached, saved, file = last_step(), max(complete(output)), metrics.stat().st_ino
        process = start()
        while metrics.stat().st_ino == file or last_step() <= saved:  # the lines after the checkpoint are removed first
            time.sleep(0.005)
        first = time.perf_counter() - killed
        while last_step() <= reached:
            time.sleep(0.005)
        rows.append({"repeated": reached - saved, "next_step": first, "new_step": time.perf_counter() - killed})
        kill(process)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--global_batch_size", type=int, default=32, help="samples per step of the steps that a save is compared with"
    )
    parser.add_argument(
        "--recoveries", type=int, default=0, help="how often to kill the recipe and measure its recovery"
    )
    parser.add_argument("--encoder", choices=("small", "base"), help="default: base on a GPU, else small")
    parser.add_argument(
        "--beside_copy", action="store_true", help="only measure saves beside a copy; write saves.json (for gpu.py)"
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", help="measure writing and reading of these sizes only")
    every = [way for way in dict.fromkeys(WRITERS + READERS) if way != "ours"]
    parser.add_argument(
        "--contestants", nargs="*", choices=every, help="with --gigabytes: what to measure beside ours; default: all"
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.contestants is None:
        arguments.contestants = every
    elif not arguments.gigabytes:
        parser.error("--contestants needs --gigabytes")
    folder = arguments.output_dir.resolve() / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report: dict[str, Any] = {
        "machine": rounds.machine(1),
        "command": rounds.command(),
        "load_average": os.getloadavg(),
    }
    if arguments.gigabytes:
        report["sizes"] = []
        for size in arguments.gigabytes:
            report["sizes"].append(measure_throughput(arguments, folder, size))
            (arguments.output_dir / "checkpoints_large_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
        shutil.rmtree(folder)
        return
    import torch

    on_gpu = torch.cuda.is_available()
    arguments.encoder, arguments.ways = arguments.encoder or ("base" if on_gpu else "small"), [*LABELS]
    if arguments.beside_copy:
        measured = measure_saves(folder, arguments.encoder, arguments.rounds)
        (arguments.output_dir / "saves.json").write_text(json.dumps(measured, indent=1) + "\n")
        shutil.rmtree(folder)
        return
    stall = measure_stall(arguments, folder)
    report |= {"summary": summarize(stall), **stall, "recovery": measure_recovery(arguments, folder)}
    name = f"checkpoints_{'gpu' if on_gpu else 'cpu'}.json"
    (arguments.output_dir / name).write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(folder)
    print(json.dumps(report["summary"] | {"recovery": report["recovery"]}, indent=1))


if __name__ == "__main__":
    main()
