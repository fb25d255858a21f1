"""The rendezvous of the processes of a launch, with errors that name the likely cause when it fails.

Processes first connect to a store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun opens, and then to each other.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import distributed as dist

from shared.compat import of_torch
from shared.errors import Preempted, UserError
from shared.launch import environment
from shared.processes import exit_reasons

PRINT_AFTER = 30.0  # seconds of waiting after which a process prints what it waits for


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


def of_existing_group() -> tuple[dist.Store, Place]:
    """The store of the default process group, which must exist, and the place of this process in it."""
    rank, address = dist.get_rank(), os.environ.get("MASTER_ADDR", "")
    place = Place(rank, dist.get_world_size(), address, int(os.environ.get("MASTER_PORT", 0)), serves=rank == 0)
    return of_torch.default_store(), place


def open_store(place: Place, seconds: float) -> dist.TCPStore:
    """Return the store at MASTER_ADDR:MASTER_PORT, which rank 0 or the launcher opens, within `seconds`.

    Raises:
        UserError: the address is another machine's, the port is in use, or nothing listens there; the likely cause.
    """
    deadline = time.monotonic() + seconds
    if place.serves:
        require_own_address(place.address)
        require_free_port(place.port)
    else:
        wait_until_reachable(place, deadline)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    with explaining_errors(place):
        return dist.TCPStore(place.address, place.port, place.processes, place.serves, left, wait_for_workers=False)


@contextlib.contextmanager
def explaining_errors(place: Place) -> Iterator[None]:
    """Turn an error of torch, when the block cannot open or join the store, into a UserError with the likely cause."""
    try:
        yield
    except dist.DistError as error:
        if place.serves:
            raise UserError(
                f"rank 0 cannot connect to its own port at {place.where} ({first_line(error)}): a firewall on "
                f"{socket.gethostname()} blocks it; open it"
            ) from None
        raise UserError(
            f"something answers at {place.where}, but it is not rank 0 of this launch ({first_line(error)}): choose "
            "another MASTER_PORT (--main_process_port, --master-port) on all machines"
        ) from None


def require_own_address(address: str) -> None:
    """Raise UserError unless `address` is one of this machine's; called on rank 0, which the others connect to."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostbyname(address), 0))
        return
    raise UserError(
        f"MASTER_ADDR {address} is not an address of {socket.gethostname()}, where rank 0 runs: start rank 0 on the "
        f"machine that has it, or use one of {', '.join(own_addresses())} on all machines"
    )


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine, except loopback addresses."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return [address for address in found if address.count(".") == 3 and not address.startswith("127.")]


def require_free_port(port: int) -> None:
    """Raise UserError if a process of this machine listens on `port`; name the process if this user may see it."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in torch's store
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"MASTER_PORT {port} cannot be opened ({error.strerror}): choose another") from None
            raise UserError(
                f"port {port} is in use on {socket.gethostname()}{owner(port)}: end that process, or choose another "
                "MASTER_PORT (--main_process_port, --master-port) on all machines"
            ) from None


def owner(port: int) -> str:
    """Return ` by process N (its name)` for the process that listens on `port`, or "" if this user may not see it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def wait_until_reachable(place: Place, deadline: float) -> None:
    """Return when something listens at the address of `place`. After PRINT_AFTER seconds, print the likely problem.

    Raises:
        UserError: nothing listens there at `deadline` (names the likely cause), or another process has ended.
        Preempted: another process of this machine was preempted.
    """
    here, why = socket.gethostname(), ""
    begun, printed = time.monotonic(), False
    while True:
        try:
            socket.create_connection((place.address, place.port), max(0.1, min(5, deadline - time.monotonic()))).close()
            return
        except socket.gaierror:
            why = (
                f"MASTER_ADDR {place.address} cannot be resolved on {here}: give machine 0's IP address "
                "(--main_process_ip, --master-addr)"
            )
        except ConnectionRefusedError:
            why = (
                f"nothing listens at {place.where}, seen from {here}: start rank 0 on that machine, and use the same "
                "MASTER_ADDR and MASTER_PORT on all machines"
            )
        except TimeoutError:
            why = why or (  # the last attempt may time out too early to find another cause
                f"no answer from {place.where} to {here}: a firewall drops the packets, or no machine has that "
                "address; open the port between the machines, or correct MASTER_ADDR"
            )
        except OSError as error:
            why = (
                f"{here} has no route to {place.where} ({error.strerror}): correct MASTER_ADDR, or use a network that "
                "connects the machines"
            )
        if time.monotonic() >= deadline:
            raise UserError(why)
        raise_if_peer_ended()
        printed = printed or print_if_long(begun, f"waiting for rank 0: {why}")
        time.sleep(0.2)


def print_if_long(begun: float, what: str) -> bool:
    """Print `what` on one process per machine if PRINT_AFTER seconds have passed since `begun`; return whether so."""
    if time.monotonic() - begun < PRINT_AFTER:
        return False
    if exit_reasons.local_rank() == 0 or exit_reasons.local_processes() <= 2:
        print(what, file=sys.stderr, flush=True)
    return True


def raise_if_peer_ended() -> None:
    """Raise UserError or Preempted if another process of this launch has ended."""
    if peer := exit_reasons.ended_peer():
        raise UserError(peer.line) if peer.line else Preempted


def exchange(
    store: dist.Store, place: Place, own: Mapping[str, Any], seconds: float, name: str = "preflight"
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
    keys = [f"facts-{rank}" for rank in range(place.processes)]
    begun, printed = time.monotonic(), False
    while not wait_for_keys(inside, keys, min(1.0, seconds)):
        raise_if_peer_ended()
        came = [rank for rank, key in enumerate(keys) if inside.check([key])]
        missing = listed(sorted({*range(place.processes)} - {*came}))
        printed = printed or print_if_long(begun, f"waiting for rank {missing} at {place.where}: see their output")
        if time.monotonic() - begun >= seconds:
            raise UserError(
                f"of {place.processes} processes, rank {missing} did not connect to {place.where} within {seconds:g} s "
                f"(rank {listed(came)} did): not started, started with another MASTER_ADDR or MASTER_PORT or with this "
                "machine's rank, or behind a firewall; see their output"
            )
    facts = [json.loads(inside.get(key)) for key in keys]
    inside.add("read", 1)
    while place.serves and inside.add("read", 0) < place.processes and seconds > 0:
        time.sleep(0.01)  # the store ends with the process that opened it: wait until all have read it
        seconds -= 0.01
    return facts


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Wait up to `seconds` until all `keys` are in the store; return whether they are."""
    with contextlib.suppress(dist.DistError):
        store.wait(keys, timedelta(seconds=seconds))
        return True
    return False


def listed(ranks: Sequence[int]) -> str:
    """The ranks as `0, 2, 3`; only the first eight of a long list."""
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def connect(store: dist.TCPStore, place: Place, seconds: float) -> None:
    """Make the default process group, in which each process connects to the others on random ports.

    Raises:
        UserError: the processes cannot connect; names the likely cause.
    """
    backend = (
        "gloo"
        if not torch.accelerator.is_available() or environment.cpu_requested(os.environ)
        else "cpu:gloo,cuda:nccl"
    )
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.processes,
            timeout=timedelta(seconds=seconds),
        )
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"the processes connected to {place.where}, but {first_line(error)}: {connection_advice()}"
        ) from None


def connection_advice() -> str:
    """What to do when processes reach the store, but cannot connect to each other."""
    advice = (
        "open all ports between the machines, or name the network between them (GLOO_SOCKET_IFNAME=eth0, "
        "NCCL_SOCKET_IFNAME=eth0)"
    )
    with contextlib.suppress(OSError):
        if socket.gethostbyname(socket.gethostname()).startswith("127."):
            advice += f"; {socket.gethostname()} is a loopback address in its own /etc/hosts, and gloo uses it"
    return advice


def first_line(error: Exception) -> str:
    """The first line of an error message, at most 200 characters; torch appends a C++ stack."""
    return str(error).splitlines()[0][:200]
