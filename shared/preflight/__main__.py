"""Check in about half a minute that the processes of a launch can connect, compute together, and have equal settings.

    torchrun --nproc-per-node 2 -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.preflight recipes/nlp.py --seed 1

It works with any launcher, and without one. With a recipe and its flags it also prints the resolved settings and
compares the data of all machines. Exit code 0: all processes connected, computed together and agree. Exit code 2: they
did not; the error names the likely cause.
"""

import contextlib
import glob
import hashlib
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.demo_data import libraries
from shared.disk import is_url
from shared.errors import UserError, count_of
from shared.extras.trackers import require_trackers
from shared.fsdp.strategy import Fsdp
from shared.options.extra_options import ExtraOptions
from shared.preflight import connecting
from shared.processes import agreement, barrier, collectives, ending, rules, signals, starting
from shared.run import launch_card, resume
from shared.run.command import load_recipe
from shared.run.training_run import Ddp

COMPARED = 64 << 20  # bytes at the start and at the end of a file that are compared
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
    """Connect the processes, compare their facts, time an all-reduce, and print the results.

    Raises:
        UserError: the processes of this launch cannot train together; names the likely cause.
    """
    config = options.parse(load_recipe(recipe).Config if recipe else options.Options, flags)
    place = agreement.Place.of_environment()
    starting.check_environment(config, rules.cpu_requested(os.environ) or not starting.has_accelerator())
    if place.processes > 1:
        with time_limit(seconds + 5, f"the processes connected to {place.where}, then one stopped"):
            store = connecting.open_store(place, seconds)
            facts = agreement.exchange(store, place, own_facts(recipe, config), seconds)
            agreement.refuse_differences(facts)
            connecting.connect(store, place, seconds)
    with time_limit(60, f"the all-reduce did not end: {connecting.connection_advice()}"):
        accelerator = starting.start(config)
        rows = launch_card.hardware(accelerator, config, (Fsdp if rules.uses_fsdp(os.environ) else Ddp).name)
        if place.processes > 1:
            hosts = collectives.gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
            rows |= {"machines": launch_card.machines(hosts), "rendezvous": place.where}
        if recipe:
            collectives.agree(accelerator, missing(config))
            rows |= resolved(accelerator, config)
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in agreement.versions().items())
        if place.processes > 1:
            rows["all-reduce"] = bandwidth(accelerator)
    width = max(map(len, rows))
    accelerator.print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
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


# Comparison of the processes


def own_facts(recipe: Path | None, config: options.Options) -> dict[str, Any]:
    """Return the facts that `agreement.own_facts` compares for a run, with the host and digests of the data added."""
    on_cpu = rules.cpu_requested(os.environ) or not starting.has_accelerator()
    facts = agreement.own_facts(config, "cpu" if on_cpu else "gpu")
    ignored = fields_with(type(config), Meaning.NOT_IN_RESULT)
    settings = [value for name, value in options.plain(config).items() if name not in ignored]
    words = [one for value in settings for one in (value if isinstance(value, list) else [value])]
    texts = [word for word in words if isinstance(word, str)]
    files = [path for word in texts for path in ([word] if Path(word).exists() else matches(word))]
    facts["version"] |= embedded_data(config) if recipe else {}
    facts["data"] = {f"of {path}": digest(Path(path)) for path in files}
    return facts | {"host": socket.gethostname()}


def embedded_data(config: options.Options) -> dict[str, str]:
    """The versions of the libraries that contain a recipe's default data; {} if the user gives other data.

    Text recipes train on sources of installed libraries, image recipes (with --train_dir) on scikit-learn's digits.
    """
    if any(getattr(config, name, None) for name in fields_with(type(config), Meaning.NAMES_DATA)):
        return {}
    if hasattr(config, "train_dir"):
        return {"scikit-learn, whose digits are the data,": metadata.version("scikit-learn")}
    _, found, _ = libraries.installed()
    return {f"{package}, whose sources are data,": version for package, version in found.items()}


def missing(config: options.Options) -> UserError | None:
    """The error for the first file or folder that a flag names and this machine lacks; None without one.

    A URL and a name that may be one of the Hub are not looked up.
    """
    hub = fields_with(type(config), Meaning.MAY_BE_ON_HUB)
    for flag in sorted(hub | fields_with(type(config), Meaning.NAMES_DATA)):
        given = getattr(config, flag) or ()
        for name in [given] if isinstance(given, str) else given:
            of_hub = flag in hub and name[0] not in "./~" and name.count("/") < 2
            if not (of_hub or is_url(name) or Path(name).exists() or matches(name)):
                return UserError(f"--{flag} {name}: no such file or folder on {socket.gethostname()}")
    return None


def matches(pattern: str) -> list[str]:
    """The files that match a pattern such as data/*.csv, sorted."""
    return sorted(glob.glob(pattern))  # noqa: PTH207  Path.glob refuses absolute patterns


def digest(path: Path) -> str:
    """The digest of a file's size, start and end, or of the names and sizes of the files in a folder."""
    if path.is_dir():
        names = "".join(f"{p.relative_to(path)} {p.stat().st_size}\n" for p in sorted(path.rglob("*")) if p.is_file())
        return hashlib.sha256(names.encode()).hexdigest()
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        found.update(file.read(COMPARED))
        file.seek(max(COMPARED, size - COMPARED))
        found.update(file.read(COMPARED))
    return found.hexdigest()


# Resolved settings of the recipe, and the speed of communication


def resolved(accelerator: Any, config: options.Options) -> dict[str, str]:
    """The rows of the card about a recipe: the batch equation, the tracker and the output folder."""
    config = resume.resolve(config, accelerator, None)
    assert config.global_batch_size
    size, processes = config.global_batch_size, accelerator.num_processes
    within = launch_card.limits(config.max_tokens, config.per_device_train_batch_size)
    batch = f"global batch {size} = {count_of(processes, 'process', 'processes')} x micro-batches"
    return {
        "batch": batch + f" of {within}" * bool(within),
        **trackers(accelerator, config),
        "output": f"{config.output_dir}, {visibility(accelerator, Path(config.output_dir))}",
    }


def trackers(accelerator: Any, config: options.Options) -> dict[str, str]:
    """The row about the trackers, which must be installed; none for a recipe without them."""
    if not isinstance(config, ExtraOptions):
        return {}
    collectives.on_main_process(accelerator, lambda: require_trackers(config.report_to))
    return {"tracker": options.shown(config.report_to)}


def visibility(accelerator: Any, output_dir: Path) -> str:
    """Whether all processes see the same folder: rank 0 writes a file to it, and the others check for the file."""

    def write_token() -> tuple[Path, bool]:
        is_new = not output_dir.exists()
        resume.check_writable(output_dir)
        token = output_dir / f".preflight-{secrets.token_hex(8)}"
        token.touch()
        return token, is_new

    def remove() -> None:
        token.unlink()
        if is_new:
            output_dir.rmdir()

    token, is_new = collectives.on_main_process(accelerator, write_token)
    blind = collectives.gather(accelerator, None if token.exists() else socket.gethostname())
    collectives.on_main_process(accelerator, remove)
    hosts = sorted({host for host in blind if host})
    if hosts:
        return f"NOT shared: {', '.join(hosts)} cannot see it, and a run could not be resumed there"
    return "seen by all processes"


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
