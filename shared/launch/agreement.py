"""What all processes of a launch must have in common, compared before anything is trained: otherwise they would train
a mixture, or wait for each other in different collective calls."""

import hashlib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import distributed as dist

from shared.config import options
from shared.errors import UserError
from shared.launch import rendezvous
from shared.processes import exit_reasons

PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "numpy")
KINDS = ("setting", "version", "code", "data")
_rounds, _names = itertools.count(), itertools.count()


def compare(store: dist.Store, place: rendezvous.Place, config: options.Options, device: str, seconds: float) -> None:
    """Refuse to go on unless all processes of the launch have the same facts; called by all, as often as by the others.

    Args:
        store: where the processes have met.
        place: this process among them.
        config: its settings.
        device: kind of its device.
        seconds: how long the others may take to come.

    Raises:
        UserError: on every process; says what differs, which value it has, and on which ranks.
    """
    room, facts = f"start-{next(_rounds)}", own_facts(config, device)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    everybody = rendezvous.exchange(store, place, exit_reasons.me() | {"digest": digest}, seconds, room)
    exit_reasons.known.store, exit_reasons.known.processes = store, everybody
    if len({each["digest"] for each in everybody}) > 1:
        refuse_differences(rendezvous.exchange(store, place, facts | exit_reasons.me(), seconds, f"{room}-facts"))
    exit_reasons.forget()


def init_method(config: options.Options, device: str) -> str:
    """How the processes find each other: as the launcher says, but compared before they connect (`compare`).

    They meet apart from those that the launcher had started before. `torchrun --max-restarts` without a c10d rendezvous
    keeps one store for all its starts, and torch 2.13 does not tell them apart: a process that is early finds the
    address of one that is dead, and both wait for ever. Agents of several machines count their restarts apart, so there
    it has to be a c10d rendezvous, which makes a store for each start.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    again = restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1"

    def find(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        place = rendezvous.Place.of_environment()
        if place.serves:
            rendezvous.require_free_port(place.port)
        else:
            rendezvous.reach(place, time.monotonic() + timeout.total_seconds())
        with rendezvous.explained(place):
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        if again:
            store = dist.PrefixStore(f"restart-{restarts}", store)
        compare(store, place, config, device, timeout.total_seconds())
        yield store, rank, world_size

    name = f"recipe{next(_names)}"  # torch takes each name once
    dist.register_rendezvous_handler(name, find)
    return f"{name}://"


def own_facts(config: options.Options, device: str) -> dict[str, Any]:
    """What has to be the same everywhere, as {kind: {name: value}}, for this process."""
    env = os.environ
    settings = {f"--{name}": options.shown(value) for name, value in options.plain(config).items()}
    for name in config.MAY_DIFFER:
        settings.pop(f"--{name}")
    if config.mixed_precision == "launcher":
        settings["--mixed_precision"] = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if config.save_on_each_node:  # each machine has folders of its own, and all its processes the same
        for name in ("output_dir", "resume_from_checkpoint"):
            settings[f"--{name} on {exit_reasons.me()['host']}"] = settings.pop(f"--{name}")
    launched = {name: value for name, value in env.items() if name.startswith("FSDP_") or name == "WORLD_SIZE"}
    launched |= {"device": device, "ACCELERATE_USE_FSDP": env.get("ACCELERATE_USE_FSDP", "false").lower()}
    return {"setting": launched | settings, "version": versions(), "code": code(config), "data": {}}


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide a run."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def code(config: options.Options) -> dict[str, str]:
    """A digest of each file of `shared/` and of the recipe's, if it has one: a cell of a notebook has none."""
    package = Path(__file__).parents[1]
    files = {f"shared/{path.relative_to(package)}": path for path in sorted(package.rglob("*.py"))}
    recipe = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    if recipe and not Path(recipe).resolve().is_relative_to(package):
        files[Path(recipe).name] = Path(recipe)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}


def refuse_differences(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError when what has to be the same everywhere is not: what, and where which value is.

    A setting that some processes do not have is compared among the others.
    """
    found = []
    for kind in KINDS:
        for name in sorted({name for fact in facts for name in fact[kind]}):
            ranks: dict[str, list[int]] = {}
            for fact in facts:
                if name in fact[kind] or kind != "setting":
                    ranks.setdefault(fact[kind].get(name, "absent"), []).append(fact["rank"])
            if len(ranks) > 1 and kind in ("code", "data"):
                found.append(f"{kind} {name} differs between {' and '.join(where(facts, r) for r in ranks.values())}")
            elif len(ranks) > 1:
                found.append(f"{name} is {', '.join(f'{value} on {where(facts, r)}' for value, r in ranks.items())}")
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise UserError("; ".join(found[:5]) + more + ": make it the same on all processes")


def where(facts: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """`host (rank 0, 1)`, of several machines the first two."""
    hosts: dict[str, list[int]] = {}
    for fact in facts:
        if fact["rank"] in ranks:
            hosts.setdefault(fact["host"], []).append(fact["rank"])
    named = [f"{host} (rank {rendezvous.listed(there)})" for host, there in hosts.items()]
    return ", ".join(named[:2]) + f" and {len(named) - 2} more machines" * (len(named) > 2)
