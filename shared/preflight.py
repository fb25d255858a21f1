"""Whether the processes of a launch can meet, and as what: known within half a minute, before anything is trained.

    torchrun --nproc-per-node 2 -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.preflight recipes/nlp.py --seed 1

Under any launcher, or none. With a recipe and its flags it also prints what these resolve to, and compares its data on
all machines. Exit code 0 when all processes met, computed together and agree; 2 with the likely cause when not.
"""

import contextlib
import glob
import hashlib
import importlib.util
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
from shared.datasets import demo_texts
from shared.errors import UserError
from shared.launch import agreement, rendezvous, starting
from shared.monitoring.tracking import require_trackers
from shared.processes import collectives, ending, signals
from shared.run import launch_card, run_folder

WHOLE = 64 << 20  # bytes; of a larger file only so many at its start and end are compared
ROUNDS = 5
ENOUGH = 0.1  # seconds; an all-reduce that takes longer is not made larger


def main(argv: Sequence[str]) -> None:
    """Do it all and end this process. `argv`: [--timeout SECONDS] [RECIPE [ITS FLAGS]], or --help."""
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
    """The timeout in seconds, the recipe if there is one, and its flags."""
    seconds, rest = 30.0, list(argv)
    if rest and rest[0] == "--timeout":
        try:
            seconds, rest = float(rest[1]), rest[2:]
        except (IndexError, ValueError):
            raise UserError("--timeout: give the seconds that the processes may take to meet") from None
    if not rest:
        return seconds, None, []
    if not Path(rest[0]).is_file():
        raise UserError(f"{rest[0]} is no file: python -m shared.preflight [--timeout SECONDS] [RECIPE [ITS FLAGS]]")
    return seconds, Path(rest[0]), rest[1:]


def check(seconds: float, recipe: Path | None, flags: list[str]) -> None:
    """Meet, compare, compute together, and print the card.

    Raises:
        UserError: the likely cause why the processes of this launch cannot train together.
    """
    config = options.parse(config_class(recipe) if recipe else options.Options, flags)
    place = rendezvous.Place.of_environment()
    starting.check_environment(config, starting.told_to_use_cpu() or not starting.has_accelerator())
    if place.processes > 1:
        with ended_after(seconds + 5, f"the processes met at {place.where}, then one of them stopped"):
            store = rendezvous.meet(place, seconds)
            facts = rendezvous.exchange(store, place, own_facts(recipe, config), seconds)
            agreement.refuse_differences(facts)
            rendezvous.connect(store, place, seconds)
    with ended_after(60, f"the all-reduce did not end: {rendezvous.unconnected()}"):
        accelerator = starting.start(config)
        rows = launch_card.hardware(accelerator)
        if place.processes > 1:
            hosts = collectives.gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
            rows |= {"machines": launch_card.machines(hosts), "meet at": place.where}
        if recipe:
            rows |= resolved(accelerator, config)
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in agreement.versions().items())
        if place.processes > 1:
            rows["all-reduce"] = bandwidth(accelerator)
    width = max(map(len, rows))
    accelerator.print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    accelerator.print(f"ready: {place.processes} process{'es' * (place.processes > 1)}")


@contextlib.contextmanager
def ended_after(seconds: float, why: str) -> Iterator[None]:
    """End this process with `why` if the block takes longer: a collective call cannot be interrupted in another way."""

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


def config_class(recipe: Path) -> type[options.Options]:
    """The Config of a recipe."""
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    found: type[options.Options] = module.Config
    return found


# Comparing


def own_facts(recipe: Path | None, config: options.Options) -> dict[str, Any]:
    """What `agreement` compares for a run, and the data, as {kind: {name: value}}, and this process's host."""
    on_cpu = starting.told_to_use_cpu() or not starting.has_accelerator()
    facts = agreement.own_facts(config, "cpu" if on_cpu else "gpu")
    settings = [value for name, value in options.plain(config).items() if name not in config.NEVER_MATTERS]
    words = [one for value in settings for one in (value if isinstance(value, list) else [value])]
    texts = [word for word in words if isinstance(word, str)]
    files = [path for word in texts for path in ([word] if Path(word).exists() else matches(word))]
    facts["version"] |= embedded_data(config) if recipe else {}
    facts["data"] = {f"of {path}": digest(Path(path)) for path in files}
    return facts | {"host": socket.gethostname()}


def embedded_data(config: options.Options) -> dict[str, str]:
    """The versions of the libraries that a recipe without data of the user's own trains on; {} where it has such data.

    Their docstrings are the data of text recipes, scikit-learn's digits that of the others, which can read folders.
    """
    if config.dataset_name or config.train_file or getattr(config, "train_dir", None):
        return {}
    if hasattr(config, "train_dir"):
        return {"scikit-learn, whose digits are the data,": metadata.version("scikit-learn")}
    _, found, _ = demo_texts.installed()
    return {f"{package}, whose docstrings are data,": version for package, version in found.items()}


def matches(pattern: str) -> list[str]:
    """The files that a pattern such as data/*.csv stands for."""
    return sorted(glob.glob(pattern))  # noqa: PTH207  Path.glob takes no absolute pattern


def digest(path: Path) -> str:
    """A digest of a file, or of the names and sizes in a folder."""
    if path.is_dir():
        names = "".join(f"{p.relative_to(path)} {p.stat().st_size}\n" for p in sorted(path.rglob("*")) if p.is_file())
        return hashlib.sha256(names.encode()).hexdigest()
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        found.update(file.read(WHOLE))
        file.seek(max(WHOLE, size - WHOLE))
        found.update(file.read(WHOLE))
    return found.hexdigest()


# What a recipe's flags resolve to here, and how fast the processes are together


def resolved(accelerator: Any, config: options.Options) -> dict[str, str]:
    """The rows of a recipe: the batch equation, tracker, output folder."""
    config = run_folder.resolve(config, accelerator, None)
    assert config.global_batch_size
    collectives.on_main_process(accelerator, lambda: require_trackers(config.report_to))
    size, processes = config.global_batch_size, accelerator.num_processes
    limits = getattr(config, "max_tokens_per_micro_batch", None), config.per_device_train_batch_size
    return {
        "batch": launch_card.product(size, processes, None, *limits),
        "tracker": options.shown(config.report_to),
        "output": f"{config.output_dir}, {visibility(accelerator, Path(config.output_dir))}",
    }


def visibility(accelerator: Any, output_dir: Path) -> str:
    """Whether the machines see the same folder: rank 0 leaves a file in it, the others look."""

    def leave_token() -> tuple[Path, bool]:
        is_new = not output_dir.exists()
        run_folder.check_writable(output_dir)
        token = output_dir / f".preflight-{secrets.token_hex(8)}"
        token.touch()
        return token, is_new

    def remove() -> None:
        token.unlink()
        if is_new:
            output_dir.rmdir()

    token, is_new = collectives.on_main_process(accelerator, leave_token)
    blind = collectives.gather(accelerator, None if token.exists() else socket.gethostname())
    collectives.on_main_process(accelerator, remove)
    hosts = sorted({host for host in blind if host})
    if hosts:
        return f"NOT shared: {', '.join(hosts)} cannot see it, and a run could not be resumed there"
    return "seen by all processes"


def bandwidth(accelerator: Any) -> str:
    """All-reduces of 1 MiB and more, until one takes long enough to be timed; the bytes that each process moves."""
    size, most = 1 << 20, (64 if accelerator.device.type == "cpu" else 256) << 20
    while (seconds := timed_all_reduce(accelerator, size)) < ENOUGH and size < most:
        size *= 4
    moved = 2 * (accelerator.num_processes - 1) / accelerator.num_processes * size
    rate = moved / seconds
    return f"{size >> 20} MiB in {seconds * 1000:.3g} ms, {rate / 1e9:.3g} GB/s in and out of each process"


def timed_all_reduce(accelerator: Any, size: int) -> float:
    """Seconds that an all-reduce of `size` bytes takes: the median of 5, the slowest process's, the same on all."""
    values = torch.empty(size // 4, device=accelerator.device)
    wait: Callable[[], object] = torch.accelerator.synchronize if values.is_cuda else lambda: None
    taken = []
    for _ in range(ROUNDS + 1):
        values.fill_(accelerator.process_index + 1)
        dist.barrier()
        wait()
        begun = time.perf_counter()
        dist.all_reduce(values)
        wait()
        taken.append(time.perf_counter() - begun)
    expected = accelerator.num_processes * (accelerator.num_processes + 1) / 2
    if not bool((values == expected).all()):
        raise UserError(f"an all-reduce of {size >> 20} MiB is not the sum of its parts: a broken device or link")
    slowest = torch.tensor(statistics.median(taken[1:]), device=accelerator.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main(sys.argv[1:])
