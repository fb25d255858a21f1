"""Check that the processes of a launch can connect, compute together, and have equal settings, in about half a minute.

    torchrun --nproc-per-node 2 -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.preflight recipes/nlp.py --seed 1

It works with any launcher, and without one. With a recipe and its flags it then makes a dry run of the recipe, which
compares the data of all machines and prints the launch card; this takes as long as the data and the model take to load.
Exit code 0: all processes connected, computed together and agree. Exit code 2: they did not; the error names the likely
cause.
"""

import contextlib
import dataclasses
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from shared.config import options
from shared.errors import UserError
from shared.preflight import connecting
from shared.processes import agreement, barrier, collectives, ending, rules, signals, starting
from shared.run import launch_card
from shared.run.command import load_recipe
from shared.run.training_run import Ddp

ROUNDS = 5
LONG_ENOUGH = 0.1  # seconds; once an all-reduce takes that long, its size is not increased further


def main(argv: Sequence[str]) -> None:
    """Run the preflight and end this process. `argv`: [--timeout SECONDS] [RECIPE [ITS FLAGS]], or --help."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    signals.die_with_launcher()
    try:
        seconds, recipe, flags = arguments(argv)
        check(seconds, recipe, flags)
    except UserError as error:
        ending.refuse(error)
    ending.end()


def arguments(argv: Sequence[str]) -> tuple[float, Path | None, list[str]]:
    """Parse `argv` into the timeout in seconds, the recipe (None if not given) and its flags."""
    seconds, rest = 30.0, list(argv)
    if rest and rest[0] == "--timeout":
        try:
            seconds, rest = float(rest[1]), rest[2:]
        except (IndexError, ValueError):
            raise UserError("--timeout: give the seconds that the processes may take to connect") from None
    if not rest:
        return seconds, None, []
    if not Path(rest[0]).is_file():
        raise UserError(f"{rest[0]} is not a file: python -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]")
    return seconds, Path(rest[0]), rest[1:]


def check(seconds: float, recipe: Path | None, flags: list[str]) -> None:
    """Connect the processes, compare their facts, time an all-reduce, print the results, and dry run the recipe.

    Raises:
        UserError: the processes of this launch cannot train together; names the likely cause.
    """
    module = load_recipe(recipe) if recipe else None
    config = options.parse(module.Config if module else options.Options, flags)
    place = agreement.Place.of_environment()
    on_cpu = rules.cpu_requested(os.environ) or not starting.has_accelerator()
    starting.check_environment(config, on_cpu)
    if place.processes > 1:
        with time_limit(seconds + 5, f"the processes connected to {place.where}, then one stopped"):
            store = connecting.open_store(place, seconds)
            agreement.compare(store, place, config, "cpu" if on_cpu else "gpu", seconds)
            connecting.connect(store, place, seconds)
    with time_limit(60, f"the all-reduce did not end: {connecting.connection_advice()}"):
        accelerator = starting.start(config)
        rows = {} if module else launch_card.hardware(accelerator, config, Ddp.name)  # a recipe prints them itself
        if place.processes > 1:
            hosts = collectives.gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
            rows |= {"machines": launch_card.machines(hosts), "rendezvous": place.where}
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in agreement.versions().items())
        if place.processes > 1:
            rows["all-reduce"] = bandwidth(accelerator)
    width = max(map(len, rows))
    accelerator.print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    if module:
        module.main(dataclasses.replace(config, dry_run=True))
    accelerator.print(f"ready: {place.processes} process{'es' * (place.processes > 1)}")


@contextlib.contextmanager
def time_limit(seconds: float, why: str) -> Iterator[None]:
    """End this process with the error `why` if the block takes longer; nothing else interrupts a collective call."""

    def end() -> None:
        print(f"error: {why}", file=sys.stderr, flush=True)
        ending.exit_now(ending.EXIT_USER_ERROR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bandwidth(accelerator: Any) -> str:
    """The speed of all-reduces, of 1 MiB and more until one takes LONG_ENOUGH, in bytes that each process moves."""
    size, most = 1 << 20, (64 if accelerator.device.type == "cpu" else 256) << 20
    while (seconds := timed_all_reduce(accelerator, size)) < LONG_ENOUGH and size < most:
        size *= 4
    moved = 2 * (accelerator.num_processes - 1) / accelerator.num_processes * size
    rate = moved / seconds
    return f"{size >> 20} MiB in {seconds * 1000:.3g} ms, {rate / 1e9:.3g} GB/s in and out of each process"


def timed_all_reduce(accelerator: Any, size: int) -> float:
    """Seconds for an all-reduce of `size` bytes: the median of 5 rounds, of the slowest process; the same on all."""
    values = torch.empty(size // 4, device=accelerator.device)
    wait: Callable[[], object] = torch.accelerator.synchronize if values.is_cuda else lambda: None
    taken = []
    for _ in range(ROUNDS + 1):
        values.fill_(accelerator.process_index + 1)
        barrier.meet(accelerator)
        wait()
        begun = time.perf_counter()
        dist.all_reduce(values)
        wait()
        taken.append(time.perf_counter() - begun)
    expected = accelerator.num_processes * (accelerator.num_processes + 1) / 2
    if not bool((values == expected).all()):
        raise UserError(f"an all-reduce of {size >> 20} MiB has a wrong result: a broken device or link")
    slowest = torch.tensor(statistics.median(taken[1:]), device=accelerator.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main(sys.argv[1:])
