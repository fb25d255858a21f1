"""Measure what saving a checkpoint costs the training loop, beside other ways to save, and how fast large ones are.

    python benchmarks/checkpoints.py --rounds 31 --output_dir out/checkpoints

All ways save the same BERT (4 layers x 256) and fused AdamW, in one process. They take turns, with a training step
before each save and one after it. Before each timing the script waits until all background work has ended, so that no
way slows down another. "stall" is how long the loop stands still: in the call, and while the next update waits for the
copy. "extra" is how much later the next step ends than without a save in the same round: it also includes what
background work takes from the step. With `taskset -c 0` one core does everything. Writes checkpoints_cpu.json into the
output folder; on a GPU checkpoints_gpu.json.

On a GPU (or with `--encoder base`) the encoder is BERT-base, 1.31 GB with its optimizer; "extra" is then the cost that
counts, because the host does not wait for the copy. A save that is due before the last one is complete waits for the
disk on top of that: at most "until_complete".

    python benchmarks/checkpoints.py --gigabytes 1.3 4 --rounds 5 --output_dir out/large

measures only how fast states of these sizes are written and read. Writing ends when the files are on disk (fsync). It
is measured beside a plain write of the same bytes (as `dd conv=fsync`), torch.save and torch.distributed.checkpoint.
Our writer has the usual priority here. Each loading, ours with the digests verified, takes place in a new process, from
the disk: the page cache has none of the files ("cold"), or from the page cache, which has all of them ("warm").

This needs about three times the size in free memory, and as much on the disk: writing happens in a process that holds
the state, our copy of it and the bytes of the plain writes, and ends before the loading begins. Writes
checkpoints_large_cpu.json.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.encoder_and_texts import SIZES

SHORT = 32  # tokens per row in the steps around a save: the cost of a save would be lost in the noise of longer steps
WIDTH = 2048  # of each linear layer of a large state
WAYS = ("nothing", "copy", "ours", "save_state")  # no save, a copy of the bytes into memory, `Saver.save`, Accelerate's
WRITERS = ("ours", "plain", "torch_save", "distributed")
READERS = ("ours", "verifying", "load_state")


def saver_in(folder: Path, accelerator: Any, **settings: Any) -> tuple[Any, Callable[[], None]]:
    """A Saver of the prepared model and optimizer, which writes into FOLDER/ours, and a function that begins a save."""
    from shared.checkpoints.progress import Progress
    from shared.checkpoints.saving import Saver
    from shared.config.options import Options
    from shared.plan.batches import Plan

    (folder / "ours").mkdir(exist_ok=True)
    config, progress = Options(output_dir=str(folder / "ours"), **settings), Progress()
    saver = Saver(accelerator, config, Plan(num_samples=10**6, seed=0, global_batch_size=1, num_epochs=1))

    def save() -> None:
        progress.step += 1
        saver.save(progress, {})

    return saver, save


# What a save costs the loop


def measure_stall(folder: Path, number: int, encoder: str, names: tuple[str, ...] = WAYS) -> dict[str, Any]:
    """Let ways of saving take turns.

    Args:
        folder: for the files.
        number: rounds.
        encoder: "small" or "base".
        names: some of WAYS.

    Returns:
        The size of the state in megabytes, and a row for each save, in seconds.
    """
    import torch
    import transformers
    from accelerate import Accelerator

    from shared.checkpoints.states import distinct, state_tensors
    from shared.config.options import Options
    from shared.optimization.optimizers import inner, make_optimizer

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(cpu=not on_gpu)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    sizes = SIZES if encoder == "small" else {}
    torch.manual_seed(0)
    vocabulary = 8192 if sizes else 30522
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=vocabulary, **sizes))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, Options()))
    saver, save = saver_in(folder, accelerator, save_total_limit=1)

    def train() -> None:
        """Make a step on random tokens."""
        ids = torch.randint(8192, (8, SHORT), device=accelerator.device)
        model(ids, labels=ids.new_zeros(8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> list[torch.Tensor]:
        return [*distinct(model.state_dict()).values(), *state_tensors(inner(optimizer))]

    train()
    places = [torch.empty_like(tensor, device="cpu", pin_memory=on_gpu) for tensor in tensors()]

    def plain_copy() -> None:
        for place, tensor in zip(places, tensors(), strict=True):
            place.copy_(tensor, non_blocking=on_gpu)
        synchronize()

    waited = [0.0]

    def timed_wait(wait: Callable[[], None] = saver._before_update) -> None:
        started = time.perf_counter()
        wait()
        waited[0] += time.perf_counter() - started

    saver._before_update = timed_wait
    calls = (lambda: None, plain_copy, save, lambda: accelerator.save_state(str(folder / "state")))
    ways: dict[str, Callable[[], object]] = dict(zip(WAYS, calls, strict=True))

    def drain() -> None:
        saver.poll(wait=True)
        shutil.rmtree(folder / "state", ignore_errors=True)

    def run(way: str, _: int) -> rounds.Row:
        train()
        drain()
        synchronize()
        started = time.perf_counter()
        ways[way]()
        called, waited[0] = time.perf_counter() - started, 0.0
        train()
        synchronize()
        through_next_step = time.perf_counter() - started
        drain()
        whole = time.perf_counter() - started
        return {"stall": called + waited[0], "through_next_step": through_next_step, "until_complete": whole}

    for name in names * 2:  # warm up
        run(name, -1)
    rows = rounds.take_turns(names, number, run)
    saver.finish()
    accelerator.free_memory()
    device, size = str(accelerator.device), sum(tensor.nbytes for tensor in tensors()) / 1e6
    return {"device": device, "megabytes": size, "rows": rows}


def summarize(rows: list[rounds.Row]) -> dict[str, Any]:
    """Medians in milliseconds, and the ratios of ours to the other ways."""
    by_way: dict[str, list[rounds.Row]] = {}
    for row in rows:
        by_way.setdefault(row["contestant"], []).append(row)

    def median(values: list[float]) -> float:
        return round(1e3 * statistics.median(values), 2)

    alone = [row["through_next_step"] for row in by_way["nothing"]]
    extra = {
        way: median([row["through_next_step"] - step for row, step in zip(mine, alone, strict=True)])
        for way, mine in by_way.items()
    }
    others = [way for way in by_way if way not in ("nothing", "ours")]
    return {
        "median_stall_ms": {way: median([row["stall"] for row in mine]) for way, mine in by_way.items()},
        "ours_against": {way: rounds.compare(rows, "stall", "ours", way) for way in others},
        "step_ms": median(alone),
        "median_extra_ms": extra,
        "extra_of_ours_against": {way: round(extra["ours"] / extra[way], 3) for way in others if extra[way] > 0},
        "median_until_complete_ms": median([row["until_complete"] for row in by_way["ours"]]),
    }


def measure_saves(folder: Path, number: int, encoder: str) -> dict[str, float]:
    """Measure `number` saves that are due when the last one is done, beside a copy of the same bytes into memory.

    Returns:
        Medians in milliseconds. `save_extra_ms` and `copy_extra_ms`: how much later the next step ends.
        `save_stall_ms`: how long the loop stands still. `save_on_disk_ms`: from the start of the save until it is on
        disk; a save that is due earlier waits for the rest of this time. `save_bytes`: the size.
    """
    measured = measure_stall(folder, number, encoder, WAYS[:3])
    medians = summarize(measured["rows"])
    return {
        "save_bytes": measured["megabytes"] * 1e6,
        "save_stall_ms": medians["median_stall_ms"]["ours"],
        "save_extra_ms": medians["median_extra_ms"]["ours"],
        "copy_extra_ms": medians["median_extra_ms"]["copy"],
        "save_on_disk_ms": medians["median_until_complete_ms"],
    }


# The speed of large checkpoints


def state_of_size(gigabytes: float) -> tuple[Any, Any, Any]:
    """An accelerator, and a model and its optimizer, whose state will have so many bytes, prepared."""
    import torch
    from accelerate import Accelerator

    from shared.config.options import Options
    from shared.optimization.optimizers import make_optimizer

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return accelerator, *accelerator.prepare(model, make_optimizer(model, Options()))


def measure_writing(folder: Path, number: int, gigabytes: float) -> dict[str, Any]:
    """Write a state of one size in each way, in turns, in a process that then ends: a row for each, and the bytes.

    In `folder`, one of our checkpoints is left in "ours", and one of `save_state` in "kept".
    """
    import torch
    from torch.distributed import checkpoint

    from shared.checkpoints import resuming
    from shared.disk import sync
    from shared.optimization.optimizers import inner

    # torch.distributed.checkpoint needs a group
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    accelerator, model, optimizer = state_of_size(gigabytes)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    saver, save = saver_in(folder, accelerator, save_total_limit=None, checkpointing_steps="no")
    new = folder / "new"

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner(optimizer).state_dict()}

    def ours() -> None:
        save()
        saver.poll(wait=True)
        assert saver.problem is None

    def plain() -> None:
        """What `dd conv=fsync` does, with the bytes of our files."""
        for name, content in contents.items():
            with (new / name).open("wb", buffering=0) as file:
                for start in range(0, len(content), 1 << 20):
                    file.write(content[start : start + (1 << 20)])
                os.fsync(file.fileno())

    def torch_save() -> None:
        for name, part in state().items():
            torch.save(part, new / name)
            sync(new / name)

    calls = (ours, plain, torch_save, lambda: checkpoint.save(state(), checkpoint_id=new))
    writers: dict[str, Callable[[], object]] = dict(zip(WRITERS, calls, strict=True))
    ours()  # lays out the memory, and starts the writer
    for thread in threading.enumerate():
        if thread.name.startswith("writer") and thread.native_id:
            with suppress(PermissionError):  # at a low priority it would measure how busy the machine is
                os.setpriority(os.PRIO_PROCESS, thread.native_id, 0)
    assert saver.staging, "not enough memory"
    (written,) = resuming.checkpoints_of(folder / "ours").values()
    contents = {file.name: memoryview(file.read_bytes()) for file in written.glob("*.safetensors")}

    def write(way: str, _: int) -> rounds.Row:
        for before in (new, *resuming.checkpoints_of(folder / "ours").values()):  # no part of the time of any way
            shutil.rmtree(before, ignore_errors=True)
        new.mkdir()
        plain()  # so that all ways find free memory that the machine has used before
        shutil.rmtree(new)
        new.mkdir()
        os.sync()
        started = time.perf_counter()
        writers[way]()
        return {"seconds": time.perf_counter() - started}

    rows = rounds.take_turns(WRITERS, number, write)
    shutil.rmtree(new)
    if not resuming.checkpoints_of(folder / "ours"):
        ours()
    saver.finish()
    accelerator.save_state(str(folder / "kept"))
    os.sync()
    torch.distributed.destroy_process_group()
    return {"bytes": sum(map(len, contents.values())), "rows": rows}


def time_of_reading(way: str, gigabytes: float, folder: Path) -> rounds.Row:
    """Load what `measure_writing` has saved in one way, in a process that has not loaded anything before."""
    from shared.checkpoints import resuming

    accelerator, *_ = state_of_size(gigabytes)
    (path,) = resuming.checkpoints_of(folder / "ours").values()
    saver, _ = saver_in(folder, accelerator)
    started, started_cpu = time.perf_counter(), time.process_time()
    if way == "load_state":
        accelerator.load_state(str(folder / "kept"))
    else:
        assert resuming.problem_with(path) is None  # checks the digests
    if way == "ours":
        saver.load(path)
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - started_cpu}


def measure_throughput(folder: Path, number: int, gigabytes: float) -> dict[str, Any]:
    """Write and read a state of one size in each way, in turns: a row for each, and the ratios of the speeds."""

    def in_new_process(function: Callable[..., Any], *words: Any) -> Any:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(function, *words).result()

    def read(name: str, _: int) -> rounds.Row:
        way, cache = name.split()
        mine = folder / ("kept" if way == "load_state" else "ours")
        for file in filter(Path.is_file, folder.rglob("*")):
            with file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while cache == "warm" and file.is_relative_to(mine) and opened.read(1 << 24):
                    pass
        return in_new_process(time_of_reading, way, gigabytes, folder)

    written = in_new_process(measure_writing, folder, number, gigabytes)
    ways = [f"{way} {cache}" for cache in ("cold", "warm") for way in READERS]
    read_rows = rounds.take_turns(ways, number, read)

    def figures(rows: list[rounds.Row], pairs: list[tuple[str, str]]) -> dict[str, Any]:
        """Speeds, and ours divided by each other one, by round."""
        ways = list(dict.fromkeys(row["contestant"] for row in rows))
        seconds = {way: statistics.median(row["seconds"] for row in rows if row["contestant"] == way) for way in ways}
        return {
            "median_gigabytes_per_second": {way: round(written["bytes"] / 1e9 / seconds[way], 3) for way in ways},
            "speed_of_ours_against": {other: rounds.compare(rows, "seconds", other, one) for one, other in pairs},
            "rows": rows,
        }

    writing = figures(written["rows"], [("ours", way) for way in WRITERS[1:]])
    reading = figures(read_rows, [(f"ours {cache}", f"load_state {cache}") for cache in ("cold", "warm")])
    return {"gigabytes": written["bytes"] / 1e9, "writing": writing, "reading": reading}


def main() -> None:
    parser = rounds.parser(__doc__, "out/checkpoints")
    parser.add_argument("--encoder", choices=("small", "base"), help="default: base on a GPU, else small")
    parser.add_argument("--beside_copy", action="store_true", help="only saves beside a copy; saves.json, for gpu.py")
    parser.add_argument("--gigabytes", type=float, nargs="+", help="measure writing and reading of these sizes only")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    def measured(function: Callable[..., dict[str, Any]], *words: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=arguments.output_dir.resolve()) as folder:
            return function(Path(folder), arguments.rounds, *words)

    about = {"machine": rounds.machine(1), "command": rounds.command(), "load_average": os.getloadavg()}
    if arguments.gigabytes:
        sizes = [measured(measure_throughput, size) for size in arguments.gigabytes]
        name, report = "checkpoints_large_cpu", about | {"sizes": sizes}
    else:
        import torch

        on_gpu = torch.cuda.is_available()
        encoder = arguments.encoder or ("base" if on_gpu else "small")
        if arguments.beside_copy:
            name, report = "saves", measured(measure_saves, encoder)
        else:
            stall = measured(measure_stall, encoder)
            name, report = "checkpoints_gpu" if on_gpu else "checkpoints_cpu", about | stall
            report["summary"] = summarize(stall["rows"])
            print(json.dumps(report["summary"], indent=1))
    (arguments.output_dir / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
