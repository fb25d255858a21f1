"""Check that the processes of a launch can connect, compute together, and have equal settings, in about half a minute.

    torchrun --nproc-per-node 2 -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.preflight recipes/nlp.py --seed 1

It works with any launcher, and without one. With a recipe and its flags it then makes a dry run of the recipe, which
compares the data of all machines and prints the launch card; this takes as long as the data and the model take to load.
Exit code 0: all processes connected, computed together and agree. Exit code 2: they did not; the error names the likely
cause.
"""

import argparse
import contextlib
import dataclasses
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from shared.config import options
from shared.errors import UserError, about, aligned, first_line
from shared.processes import agreement, collectives, ending, starting
from shared.processes.agreement import Place
from shared.run import launch_card
from shared.run.recipes import load_recipe, run_work
from shared.run.training_run import Ddp

ROUNDS = 5
LONG_ENOUGH = 0.1  # seconds; once an all-reduce takes that long, its size is not increased further
TRY = 5.0  # seconds of one attempt to connect
PORT = "choose another MASTER_PORT (--main_process_port, --master-port) on all machines"
CONNECTION = (
    "open all ports between the machines, or name the network between them (GLOO_SOCKET_IFNAME=eth0, "
    "NCCL_SOCKET_IFNAME=eth0); gloo also fails where /etc/hosts gives a machine a loopback address"
)


def main(argv: Sequence[str]) -> None:
    """Run the preflight and end this process. `argv`: [--timeout SECONDS] [RECIPE [ITS FLAGS]], or --help."""
    usage = "%(prog)s [--timeout SECONDS] [RECIPE [ITS FLAGS]]"
    parser = argparse.ArgumentParser("python -m shared.preflight", usage, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds in which the processes have to connect")
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    run_work(lambda: check_machines(given.timeout, given.recipe, given.flags))


def check_machines(seconds: float, recipe: Path | None, flags: list[str]) -> None:
    """Connect the processes as a run does, time an all-reduce, print the results, and dry run the recipe.

    Raises:
        UserError: the processes of this launch cannot train together; names the likely cause.
    """
    module = load_recipe(recipe) if recipe else None
    config = options.parse(module.Config if module else options.Options, flags)
    place = Place.of_environment()
    if place.processes > 1:
        find_rank_0(place, seconds)
    with time_limit(seconds + 60, f"the processes reach {place.where}, then one stopped: {CONNECTION}"):
        accelerator = connect(config, place, seconds) if place.processes > 1 else starting.start(config)
        rows = {} if module else launch_card.hardware(accelerator, Ddp.name)  # a recipe prints them itself
        if place.processes > 1:
            hosts = collectives.gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
            rows |= {"machines": launch_card.machines(hosts), "rendezvous": place.where}
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in agreement.versions().items())
        if place.processes > 1:
            rows["all-reduce"] = bandwidth(accelerator)
    accelerator.print(aligned(rows))
    if module:
        module.main(dataclasses.replace(config, dry_run=True))
    accelerator.print(f"ready: {place.processes} process{'es' * (place.processes > 1)}")


def find_rank_0(place: Place, seconds: float) -> None:
    """Return once rank 0 or the launcher answers at MASTER_ADDR:MASTER_PORT; on rank 0, if it can open this port.

    Raises:
        UserError: the port cannot be opened, or does not answer within `seconds`; names the likely cause.
        Preempted: another process of this machine was preempted.
    """
    deadline, host = time.monotonic() + seconds, socket.gethostname()
    if place.serves:
        with about(f"rank 0 cannot open its port on {host}; {PORT}, or start rank 0 on the machine with MASTER_ADDR"):
            socket.create_server((place.address, place.port)).close()
        return
    while True:
        try:  # torch retries as well, but prints pages and does not see that another process has ended
            socket.create_connection((place.address, place.port), min(TRY, seconds)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{host} cannot connect to rank 0 at {place.where} ({error.strerror or error}): "
                    "start rank 0 there, give the same MASTER_ADDR and MASTER_PORT everywhere, and open the port"
                ) from None
        agreement.raise_if_peer_ended()
        time.sleep(0.2)
    why = f"what answers at {place.where} is not rank 0 of this launch, or a firewall on {host} blocks it; {PORT}"
    with about(why):
        dist.TCPStore(place.address, place.port, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def connect(config: options.Options, place: Place, seconds: float) -> Any:
    """Start as a run does, within `seconds`; return the Accelerator. Each process connects to others on random ports.

    Raises:
        UserError: see `starting.start`; or the processes do not reach each other; names the likely cause.
    """
    try:
        return starting.start(config, timedelta(seconds=seconds))
    except RuntimeError as error:  # of the store, gloo or NCCL
        agreement.raise_if_peer_ended()
        why = f"the processes reach {place.where}, but not each other; {CONNECTION}: {first_line(error)}"
        raise UserError(why) from error


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
    rate = 2 * (accelerator.num_processes - 1) / accelerator.num_processes * size / seconds
    return f"{size >> 20} MiB in {seconds * 1000:.3g} ms, {rate / 1e9:.3g} GB/s in and out of each process"


def timed_all_reduce(accelerator: Any, size: int) -> float:
    """Seconds for an all-reduce of `size` bytes: the median of 5 rounds, of the slowest process; the same on all."""
    values = torch.empty(size // 4, device=accelerator.device)
    wait: Callable[[], object] = torch.accelerator.synchronize if values.is_cuda else lambda: None
    taken = []
    for _ in range(ROUNDS + 1):
        values.fill_(accelerator.process_index + 1)
        collectives.meet(accelerator)
        wait()
        begun = time.perf_counter()
        dist.all_reduce(values)
        wait()
        taken.append(time.perf_counter() - begun)
    expected = accelerator.num_processes * (accelerator.num_processes + 1) / 2
    if not bool((values == expected).all()):
        raise UserError(f"an all-reduce of {size >> 20} MiB has a wrong result: a broken device or link")
    return max(collectives.gather(accelerator, statistics.median(taken[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
