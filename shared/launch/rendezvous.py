"""Where the processes of a launch meet; and why they cannot, as far as a process can tell.

They meet in a store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun opens, and connect to each other from there.
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

SAID_AFTER = 30.0  # seconds of waiting after which a process says for whom it waits


@dataclass(frozen=True)
class Place:
    """This process in its launch, and where the processes are to meet."""

    rank: int
    processes: int
    address: str
    port: int
    serves: bool
    """Whether this process opens the port; under torchrun the launcher has done so."""

    @staticmethod
    def of_environment() -> "Place":
        """As the launcher's variables say; a process that has none is alone."""
        env = os.environ
        rank, launchers = int(env.get("RANK", 0)), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = int(env.get("MASTER_PORT", 0))
        processes = int(env.get("WORLD_SIZE", 1))
        return Place(rank, processes, env.get("MASTER_ADDR", ""), port, rank == 0 and not launchers)

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def place_met() -> tuple[dist.Store, Place]:
    """The store and this process's place where the default process group is there already, by whomever it was made."""
    rank, address = dist.get_rank(), os.environ.get("MASTER_ADDR", "")
    place = Place(rank, dist.get_world_size(), address, int(os.environ.get("MASTER_PORT", 0)), serves=rank == 0)
    return of_torch.default_store(), place


def meet(place: Place, seconds: float) -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, opened by rank 0 or the launcher.

    Raises:
        UserError: the address is another machine's, the port is taken, or nobody answers there; the likely cause.
    """
    deadline = time.monotonic() + seconds
    if place.serves:
        require_own(place.address)
        require_free_port(place.port)
    else:
        reach(place, deadline)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    with explained(place):
        return dist.TCPStore(place.address, place.port, place.processes, place.serves, left, wait_for_workers=False)


@contextlib.contextmanager
def explained(place: Place) -> Iterator[None]:
    """Say in one line why the store at the meeting point cannot be opened or joined in this block."""
    try:
        yield
    except dist.DistError as error:
        if place.serves:
            raise UserError(
                f"rank 0 cannot connect to its own port at {place.where} ({first_line(error)}): a firewall on "
                f"{socket.gethostname()} closes it even there; open it"
            ) from None
        raise UserError(
            f"something answers at {place.where}, but it is not rank 0 of this launch ({first_line(error)}): choose "
            "another MASTER_PORT (--main_process_port, --master-port) on all machines"
        ) from None


def require_own(address: str) -> None:
    """Raise UserError when `address` is not one of this machine's, where rank 0 runs: the others would not find it."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostbyname(address), 0))
        return
    raise UserError(
        f"MASTER_ADDR {address} is no address of {socket.gethostname()}, where rank 0 runs: start rank 0 on the "
        f"machine that has it, or give one of {', '.join(own_addresses())} on all"
    )


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses but for the loopback."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return [address for address in found if address.count(".") == 3 and not address.startswith("127.")]


def require_free_port(port: int) -> None:
    """Raise UserError, with the owner if it can be known, when something listens on `port` here."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
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
    """` by process N (its name)` for a port that this user may look up, else nothing."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def reach(place: Place, deadline: float) -> None:
    """Return once something listens at the meeting point; say why it does not, if that takes long.

    Raises:
        UserError: why not, as far as the last attempt tells; or another process of this machine has ended.
        Preempted: another process of this machine was told to end.
    """
    here, why = socket.gethostname(), ""
    begun, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((place.address, place.port), max(0.1, min(5, deadline - time.monotonic()))).close()
            return
        except socket.gaierror:
            why = (
                f"MASTER_ADDR {place.address} is no name that {here} knows: give machine 0's IP address "
                "(--main_process_ip, --master-addr)"
            )
        except ConnectionRefusedError:
            why = (
                f"nothing listens at {place.where}, seen from {here}: start rank 0 on that machine, and give the same "
                "MASTER_ADDR and MASTER_PORT on all"
            )
        except TimeoutError:
            why = why or (  # the last attempt may be too short to be told more
                f"no answer from {place.where} to {here}: a firewall drops the packets, or no machine has that "
                "address; open the port between the machines, or correct MASTER_ADDR"
            )
        except OSError as error:
            why = (
                f"{here} has no way to {place.where} ({error.strerror}): a wrong MASTER_ADDR, or a network that the "
                "machines do not share"
            )
        if time.monotonic() >= deadline:
            raise UserError(why)
        end_with_peers()
        said = said or say_if_long(begun, f"waiting for rank 0: {why}")
        time.sleep(0.2)


def say_if_long(begun: float, what: str) -> bool:
    """Say for whom this process waits, once that takes long, on one process of each machine; whether it is said."""
    if time.monotonic() - begun < SAID_AFTER:
        return False
    if exit_reasons.local_rank() == 0 or exit_reasons.local_processes() <= 2:
        print(what, file=sys.stderr, flush=True)
    return True


def end_with_peers() -> None:
    """Wait for nobody any more when another process of this launch has ended: raise what ends this one as well."""
    if peer := exit_reasons.found():
        raise UserError(peer.line) if peer.line else Preempted


def exchange(
    store: dist.Store, place: Place, own: Mapping[str, Any], seconds: float, room: str = "preflight"
) -> list[dict[str, Any]]:
    """What every process says of itself in a `room` that they use once, by rank.

    Raises:
        UserError: a rank came twice or not at all, or another process has ended.
        Preempted: another process was told to end.
    """
    inside = dist.PrefixStore(room, store)
    if inside.add(f"came-{place.rank}", 1) > 1:
        raise UserError(
            f"two processes have RANK {place.rank}, one of them on {socket.gethostname()}: give every machine its own "
            "--machine_rank (--node-rank), every process its own RANK"
        )
    inside.set(f"facts-{place.rank}", json.dumps(dict(own) | {"rank": place.rank}))
    keys = [f"facts-{rank}" for rank in range(place.processes)]
    begun, said = time.monotonic(), False
    while not all_there(inside, keys, min(1.0, seconds)):
        end_with_peers()
        came = [rank for rank, key in enumerate(keys) if inside.check([key])]
        missing = listed(sorted({*range(place.processes)} - {*came}))
        said = said or say_if_long(begun, f"waiting for rank {missing} to come to {place.where}: see what they say")
        if time.monotonic() - begun >= seconds:
            raise UserError(
                f"of {place.processes} processes rank {missing} did not come to {place.where} within {seconds:g} s "
                f"(rank {listed(came)} did): not started, started with another MASTER_ADDR or MASTER_PORT, given this "
                "machine's rank, or behind a firewall; see what they say"
            )
    facts = [json.loads(inside.get(key)) for key in keys]
    inside.add("read", 1)
    while place.serves and inside.add("read", 0) < place.processes and seconds > 0:
        time.sleep(0.01)  # the store ends with the process that opened it: all have to have read the same
        seconds -= 0.01
    return facts


def all_there(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Whether all these keys are in the store, or come into it within so many seconds."""
    with contextlib.suppress(dist.DistError):
        store.wait(keys, timedelta(seconds=seconds))
        return True
    return False


def listed(ranks: Sequence[int]) -> str:
    """`0, 2, 3`; of a long list the first eight."""
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def connect(store: dist.TCPStore, place: Place, seconds: float) -> None:
    """Make the default process group; each process connects to the others, on ports of their own.

    Raises:
        UserError: they cannot, with the likely cause.
    """
    backend = (
        "gloo"
        if not torch.accelerator.is_available() or environment.says_yes(os.environ, "ACCELERATE_USE_CPU")
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
        raise UserError(f"the processes met at {place.where}, but {first_line(error)}: {unconnected()}") from None


def unconnected() -> str:
    """The likely causes when processes have met, but not connected to each other."""
    said = (
        "open all ports between the machines, or name the network that joins them (GLOO_SOCKET_IFNAME=eth0, "
        "NCCL_SOCKET_IFNAME=eth0)"
    )
    with contextlib.suppress(OSError):
        if socket.gethostbyname(socket.gethostname()).startswith("127."):
            said += f"; {socket.gethostname()} is a loopback address in its own /etc/hosts, which gloo tells the others"
    return said


def first_line(error: Exception) -> str:
    """torch appends the C++ stack to its messages."""
    return str(error).splitlines()[0][:200]
