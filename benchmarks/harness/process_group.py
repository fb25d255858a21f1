"""Start a process group without a launcher: on this machine, in network namespaces, or on hosts reached by ssh."""

import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT = 540  # seconds for one launch


def environment_of(
    rank: int, processes: int, places: Any, hosts: list[str] | None, port: int, gpus: bool
) -> dict[str, Any]:
    """The environment of a process of the group; a single process belongs to no group."""
    environment: dict[str, Any] = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "TQDM_DISABLE": 1}
    if not gpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    if processes == 1:
        return environment
    if places:
        environment["GLOO_SOCKET_IFNAME"] = places[rank][2]
    return environment | {
        "RANK": rank,
        "LOCAL_RANK": 0 if places or hosts else rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": 1 if places or hosts else processes,
        "MASTER_ADDR": places[0][1] if places else hosts[0] if hosts else "127.0.0.1",
        "MASTER_PORT": port,
    }


def run_group(
    command: list[str], processes: int, places: Any, hosts: list[str] | None, log: Path, gpus: bool = False
) -> None:
    """Start `command` in each process of a group and wait until all have ended.

    Args:
        command: words of the command.
        processes: size of the group.
        places: command prefix, address and interface of each process, as `limited_links.limited` gives them; or None.
        hosts: machines to start the processes on, by ssh; or None.
        log: each process prints into a file beside this path, with its rank in the name.
        gpus: whether the processes use GPUs.

    Raises:
        RuntimeError: a process failed (the message ends with the last lines of its log), or the group took longer than
            `TIMEOUT`.
    """
    with socket.socket() as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
    running, logs = [], []
    for rank in range(processes):
        environment = environment_of(rank, processes, places, hosts, port, gpus)
        prefix = places[rank][0] if places else []
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        words = ["ssh", hosts[rank % len(hosts)], shlex.join(words)] if hosts else [*prefix, *words]
        logs.append(log.with_suffix(f".{rank}.log").open("w+"))
        running.append(subprocess.Popen(words, stdout=logs[-1], stderr=subprocess.STDOUT, start_new_session=True))
    deadline = time.monotonic() + TIMEOUT
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(command)} took over {TIMEOUT} s")
            time.sleep(0.05)
        if failed := [rank for rank, process in enumerate(running) if process.poll()]:
            logs[failed[0]].seek(0)
            raise RuntimeError(f"{shlex.join(command)} failed:\n{logs[failed[0]].read()[-3000:]}")
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in logs:
            file.close()
