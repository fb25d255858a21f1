"""Two machines, simulated by network namespaces."""

import os
import subprocess

import pausing
import pytest


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def hosts():
    """Two network namespaces, joined by a virtual cable: [(name, address)]."""
    pausing.require("ip", "iproute2")
    names = [f"recipes-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "host0", "netns", names[0], "type", "veth", "peer", "name", "host1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"host{i}")
            ip("-n", name, "link", "set", f"host{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
