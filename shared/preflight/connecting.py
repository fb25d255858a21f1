"""Connect the processes of a launch, with errors that name the likely cause when that fails.

Processes first connect to a store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun opens, and then to each other.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
from torch import distributed as dist

from shared.errors import UserError, first_line
from shared.processes import rules
from shared.processes.agreement import Place, print_if_long, raise_if_peer_ended


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
                f"rank 0 cannot connect to its own port at {place.where} ({first_line(error)[:200]}): a firewall on "
                f"{socket.gethostname()} blocks it; open it"
            ) from None
        raise UserError(
            f"something answers at {place.where}, but it is not rank 0 of this launch ({first_line(error)[:200]}): "
            "choose another MASTER_PORT (--main_process_port, --master-port) on all machines"
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


def connect(store: dist.TCPStore, place: Place, seconds: float) -> None:
    """Make the default process group, in which each process connects to the others on random ports.

    Raises:
        UserError: the processes cannot connect; names the likely cause.
    """
    backend = (
        "gloo" if not torch.accelerator.is_available() or rules.cpu_requested(os.environ) else "cpu:gloo,cuda:nccl"
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
            f"the processes connected to {place.where}, but {first_line(error)[:200]}: {connection_advice()}"
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
