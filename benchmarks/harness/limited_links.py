"""Process groups on one machine, also over slow links: each process in its own namespace, behind a token bucket (tbf).

A bridge in one more namespace connects them. The machine's own network stays as it is, and removing the namespaces
removes everything.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

TIMEOUT = 540  # seconds for one launch of a group
BURST = "256kb"  # larger than any packet of a virtual interface, small compared with a gradient
QUEUE = "50ms"


def why_not() -> str | None:
    """The reason why no link can be limited here, or None. It adds a namespace and removes it again."""
    if os.geteuid() != 0:
        return "limiting a link needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    probe = f"ar{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine allows no network namespaces"
    try:
        bucket = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", BURST, "latency", QUEUE]
        limited = subprocess.run(["ip", "netns", "exec", probe, *bucket], capture_output=True, check=False)
        return f"tc tbf does not work: {limited.stderr.decode().strip()}" if limited.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=True)


@contextmanager
def limited(count: int, megabits: float) -> Iterator[list[tuple[list[str], str, str]]]:
    """Make `count` namespaces whose links send at most `megabits` per second: (command prefix, address, interface)."""
    name = f"ar{os.getpid()}"
    hub, spaces = f"{name}h", [f"{name}n{i}" for i in range(count)]
    try:
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for i, space in enumerate(spaces):
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "link0", "netns", space)
            run("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
            run("ip", "-n", space, "address", "add", f"10.77.0.{i + 1}/24", "dev", "link0")
            run("ip", "-n", space, "link", "set", "link0", "up")
            bucket = ["tbf", "rate", f"{megabits:g}mbit", "burst", BURST, "latency", QUEUE]
            run("tc", "-n", space, "qdisc", "add", "dev", "link0", "root", *bucket)
        yield [(["ip", "netns", "exec", s], f"10.77.0.{i + 1}", "link0") for i, s in enumerate(spaces)]
    finally:
        for space in [*spaces, hub]:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", space)


def run(*command: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run(command, check=True, capture_output=True)


def environment_of(rank: int, processes: int, places: Any, port: int, gpus: bool) -> dict[str, Any]:
    """The environment of a process of the group; a single process belongs to no group."""
    environment: dict[str, Any] = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "TQDM_DISABLE": 1}
    if not gpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    if processes == 1:
        return environment
    environment |= {"RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    if places:
        environment |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": places[rank][2]}
        return environment | {"MASTER_ADDR": places[0][1]}
    return environment | {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}


def run_group(command: list[str], processes: int, megabits: float, log: Path, gpus: bool = False) -> None:
    """Start `command` in each process of a group without a launcher, and wait until all have ended.

    Args:
        command: words of the command.
        processes: size of the group.
        megabits: per second, see `limited`; 0: no limit.
        log: each process prints into a file beside this path, with its rank in the name.
        gpus: whether the processes use GPUs.

    Raises:
        RuntimeError: a process failed (the message ends with the last lines of its log), or the group took longer than
            `TIMEOUT`.
    """
    with socket.socket() as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
    logs = [log.with_suffix(f".{rank}.log") for rank in range(processes)]
    with limited(processes, megabits) if megabits else nullcontext() as places:
        running = []
        for rank, path in enumerate(logs):
            environment = environment_of(rank, processes, places, port, gpus)
            words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
            words = [*(places[rank][0] if places else ()), *words]
            with path.open("w") as file:
                running.append(subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True))
        deadline = time.monotonic() + TIMEOUT
        try:
            while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{shlex.join(command)} took over {TIMEOUT} s")
                time.sleep(0.05)
            if failed := [path for path, process in zip(logs, running, strict=True) if process.poll()]:
                raise RuntimeError(f"{shlex.join(command)} failed:\n{failed[0].read_text()[-3000:]}")
        finally:
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
