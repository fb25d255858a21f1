"""Slow links on one machine: each process runs in its own network namespace, behind a token bucket (tc tbf).

A bridge in one more namespace connects them. The machine's own network stays as it is, and removing the namespaces
removes everything.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BURST = "256kb"  # larger than any packet of a virtual interface, small compared with a gradient
QUEUE = "50ms"
GOODPUT = 0.95  # share of the rate that is payload: headers take 66 of 1,514 bytes


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
    """Run a command.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(command, check=True, capture_output=True)
