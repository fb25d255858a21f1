"""The rendezvous of the processes, and the comparison of their settings, versions and code before training.

With differences, they would train different models, or wait for each other in different collective calls.
"""

import hashlib
import itertools
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import distributed as dist

from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.errors import Preempted, UserError, about, listed
from shared.processes import ending

PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "numpy")
PRINT_AFTER = 30.0  # seconds of waiting after which a process prints what it waits for
_rounds, _names = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of processes, and the address of the store."""

    rank: int
    processes: int
    address: str
    port: int
    serves: bool
    """Whether this process opens the port. Under torchrun the launcher opens it."""

    @staticmethod
    def of_environment() -> "Place":
        """Read the launcher's environment variables; without them the process is alone."""
        env = os.environ
        rank, launchers = int(env.get("RANK", 0)), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = int(env.get("MASTER_PORT", 0))
        processes = int(env.get("WORLD_SIZE", 1))
        return Place(rank, processes, env.get("MASTER_ADDR", ""), port, rank == 0 and not launchers)

    @property
    def where(self) -> str:
        """`address:port`."""
        return f"{self.address}:{self.port}"


def compare_processes(store: dist.Store, config: options.Options, device: str, seconds: float) -> None:
    """Check that all processes of the launch have the same facts (`own_facts`). All must call this equally often.

    Args:
        store: the store to which the processes are connected.
        config: the settings of this process.
        device: "cpu" or "gpu".
        seconds: how long to wait for the other processes.

    Raises:
        UserError: on every process; names what differs, its values, and their ranks.
    """
    place, name, facts = Place.of_environment(), f"start-{next(_rounds)}", own_facts(config, device)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    everybody = exchange(store, place, ending.identity() | {"digest": digest}, seconds, name)
    ending.known.store, ending.known.processes = store, everybody
    if len({each["digest"] for each in everybody}) > 1:
        refuse_differences(exchange(store, place, ending.identity() | {"facts": facts}, seconds, f"{name}-facts"))
    ending.unlink_file()


def raise_if_peer_ended() -> None:
    """Raise UserError or Preempted if another process of this launch has ended."""
    if peer := ending.ended_peer():
        raise UserError(peer.line) if peer.line else Preempted


def exchange(
    store: dist.Store, place: Place, own: Mapping[str, Any], seconds: float, name: str
) -> list[dict[str, Any]]:
    """Gather `own` from every process, by rank, through the store. Each exchange needs its own `name`.

    Raises:
        UserError: two processes have the same rank, a rank is missing after `seconds`, or another process has ended.
        Preempted: another process was preempted.
    """
    inside = dist.PrefixStore(name, store)
    if inside.add(f"came-{place.rank}", 1) > 1:
        raise UserError(
            f"two processes have RANK {place.rank}, one of them on {socket.gethostname()}: give each machine its own "
            "--machine_rank (--node-rank), and each process its own RANK"
        )
    inside.set(f"facts-{place.rank}", json.dumps(dict(own) | {"rank": place.rank}))
    inside.add("here", 1)
    speaks = ending.local_rank() == 0 or ending.local_processes() <= 2
    begun, print_after = time.monotonic(), PRINT_AFTER if speaks else math.inf
    while inside.add("here", 0) < place.processes:
        raise_if_peer_ended()
        time.sleep(0.1)
        if (waited := time.monotonic() - begun) < min(print_after, seconds):
            continue
        came = [rank for rank in range(place.processes) if inside.check([f"facts-{rank}"])]
        missing = listed(sorted({*range(place.processes)} - {*came}), 8)
        if waited >= seconds:
            raise UserError(
                f"of {place.processes} processes, rank {missing} did not connect to {place.where} within {seconds:g} s "
                f"(rank {listed(came, 8)} did): not started, started with another MASTER_ADDR or MASTER_PORT or "
                "with this machine's rank, or behind a firewall; see their output"
            )
        print(f"waiting for rank {missing} at {place.where}: see their output", file=sys.stderr, flush=True)
        print_after = math.inf
    facts = [json.loads(inside.get(f"facts-{rank}")) for rank in range(place.processes)]
    inside.add("read", 1)
    while place.serves and inside.add("read", 0) < place.processes and seconds > 0:
        time.sleep(0.01)  # the store ends with the process that opened it: wait until all have read it
        seconds -= 0.01
    return facts


def init_method(config: options.Options, device: str) -> str:
    """Return an init_method for the process group: the launcher's rendezvous, followed by `compare_processes`.

    On a single machine it separates restarts. `torchrun --max-restarts` without a c10d rendezvous uses the same store
    for every restart, and torch 2.13 does not separate them: a process that starts early reads the address of a dead
    process, and waits forever. On several machines each agent counts its own restarts; there use a c10d rendezvous
    with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes a new store for each restart.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    separate = restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1"

    def find(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        place = Place.of_environment()
        with about(f"MASTER_ADDR:MASTER_PORT {place.where} (python -m shared.preflight finds the cause)"):
            # torch's own rendezvous waits here for all processes, and does not say which ones are missing.
            store: dist.Store = dist.TCPStore(
                place.address, place.port, place.processes, place.serves, timeout, wait_for_workers=False
            )
        if separate:
            store = dist.PrefixStore(f"restart-{restarts}", store)
        compare_processes(store, config, device, timeout.total_seconds())
        yield store, place.rank, place.processes

    name = f"recipe{next(_names)}"  # torch accepts each name only once
    dist.register_rendezvous_handler(name, find)
    return f"{name}://"


def own_facts(config: options.Options, device: str) -> dict[str, str]:
    """This process's values of what must be the same on all: settings of recipe and launcher, versions, and code."""
    env = os.environ
    own = fields_with(type(config), Meaning.MAY_DIFFER)
    compared = {name: value for name, value in options.plain(config).items() if name not in own}
    settings = {f"--{name}": options.shown(value) for name, value in compared.items()}
    if config.mixed_precision == "launcher":
        settings["--mixed_precision"] = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if config.save_on_each_node:  # each machine has its own folders, shared by its processes
        for name in ("output_dir", "resume_from_checkpoint"):
            settings[f"--{name} on {ending.identity()['host']}"] = settings.pop(f"--{name}")
        asked = config.resume_from_checkpoint  # each word is another way through `resuming.find`
        settings["--resume_from_checkpoint"] = asked if asked in ("auto", "never") else "a path"
    launched = {name: value for name, value in env.items() if name.startswith("FSDP_") or name == "WORLD_SIZE"}
    launched |= {"device": device, "ACCELERATE_USE_FSDP": env.get("ACCELERATE_USE_FSDP", "false").lower()}
    code = {f"code {name}": digest[:12] for name, digest in code_digests(config).items()}
    return launched | settings | versions() | code


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the result, of those that are installed."""
    found = {name: each.version for name in PACKAGES for each in [*metadata.distributions(name=name)][:1]}
    return {"python": platform.python_version()} | found


def code_digests(config: options.Options) -> dict[str, str]:
    """The digest of each file of `shared/` and of the recipe's file; the latter does not exist for a notebook cell."""
    package = Path(__file__).parents[1]
    files = {f"shared/{path.relative_to(package)}": path for path in sorted(package.rglob("*.py"))}
    recipe = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    if recipe and not Path(recipe).resolve().is_relative_to(package):
        files[Path(recipe).name] = Path(recipe)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}


def refuse_differences(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if the facts of the processes differ; it names what differs, its values, and a rank with each.

    A flag that only some processes have, such as the output folder of one machine, is compared among those.
    """
    found = []
    for name in dict.fromkeys(name for each in everybody for name in each["facts"]):
        places: dict[str, str] = {}
        for each in everybody:
            if name in each["facts"] or not name.startswith("--"):
                places.setdefault(each["facts"].get(name, "absent"), f"{each['host']} (rank {each['rank']})")
        if len(places) > 1:
            found.append(f"{name} is {', '.join(f'{value} on {place}' for value, place in places.items())}")
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise UserError("; ".join(found[:5]) + more + ": make it the same on all processes")
