"""clusters/torchrun_elastic.sh: machines fail and join. Two machines are simulated by network namespaces."""

import os
import sys
import time

import pytest
import runs
from pausing import RECIPE, environment, notes, wait_for

pytestmark = pytest.mark.clusters
STEPS, FIRST_PAUSE, SECOND_PAUSE = 24, 8, 16
FLAGS = [
    *(*runs.TINY, "--max_train_steps", STEPS, "--eval_steps", STEPS, "--logging_steps", 1),
    *("--checkpointing_steps", 4, "--save_total_limit", "None"),
]


class Host:
    """A simulated machine: its torchrun agent and workers are started and killed together."""

    def __init__(self, number, hosts, folder, flags):
        name, address = hosts[number]
        self.log = folder / f"host{number}-{time.monotonic_ns()}.log"
        command = ["sh", "clusters/torchrun_elastic.sh", "1:2", f"{hosts[0][1]}:29511", runs.ROOT / RECIPE, *flags]
        own = {"PROCESSES": "1", "LOCAL_ADDR": address, "GLOO_SOCKET_IFNAME": f"host{number}"}
        own |= {"PATH": f"{runs.BIN}:{os.environ['PATH']}"} | environment(folder, FIRST_PAUSE, SECOND_PAUSE)
        words = ["ip", "netns", "exec", name, *command, "--output_dir", folder / "run"]
        with self.log.open("w") as log:
            self.process = runs.start(words, output=log, **own)


def wait(what, *hosts):
    """Wait until `what()` is true while one of the machines is alive; return its value."""
    logs = (host.log for host in hosts)
    return wait_for(what, *logs, alive=lambda: any(host.process.poll() is None for host in hosts))


def reached(folder, step, world, since=0.0):
    """The first note of this step or a later one with `world` processes, or None."""
    found = (n for n in notes(folder) if n.get("step", -1) >= step and n["world"] == str(world) and n["time"] > since)
    return next(found, None)


@pytest.fixture
def start(hosts, tmp_path):
    """A function that starts a machine; all are killed after the test."""
    started = []

    def start(*arguments):
        started.append(Host(*arguments))
        return started[-1]

    yield start
    for host in started:
        runs.power_off(host.process)


def test_a_run_equals_one_on_one_process_although_a_machine_dies_and_comes_back(hosts, start, texts, tmp_path):
    flags = [*map(str, FLAGS), *map(str, texts)]
    first, second = start(0, hosts, tmp_path, flags), start(1, hosts, tmp_path, flags)
    wait(lambda: reached(tmp_path, FIRST_PAUSE, 2), first, second)

    runs.power_off(second.process)
    killed = time.time()
    (tmp_path / f"go-{FIRST_PAUSE}").touch()
    alone = wait(lambda: reached(tmp_path, FIRST_PAUSE, 1, killed), first)
    started = next(n["time"] for n in notes(tmp_path) if n.get("started") and n["time"] > killed)
    print(
        f"\nfrom the kill to the next step {alone['time'] - killed:.1f} s: torchrun {started - killed:.1f} s, "
        f"the recipe's start {alone['time'] - started:.1f} s"
    )

    wait(lambda: reached(tmp_path, SECOND_PAUSE, 1), first)
    back = time.time()
    third = start(1, hosts, tmp_path, flags)
    grown = wait(lambda: reached(tmp_path, SECOND_PAUSE, 2, back), first, third)
    print(f"from the machine's return to the next step {grown['time'] - back:.1f} s")
    (tmp_path / f"go-{SECOND_PAUSE}").touch()
    for host in (first, third):
        assert host.process.wait(timeout=240) == 0, host.log.read_text()[-5000:]

    runs.succeed([sys.executable, "recipes/nlp.py", *flags, "--output_dir", tmp_path / "alone"], OMP_NUM_THREADS="1")
    elastic, one = tmp_path / "run", tmp_path / "alone"
    samples = [[line["samples"] for line in runs.training_lines(output)] for output in (elastic, one)]
    assert len(samples[0]) == STEPS
    assert samples[0] == samples[1]
    assert runs.distance(runs.weights(elastic), runs.weights(one)) < 1e-5
    assert {path.name for path in elastic.iterdir()} == {path.name for path in one.iterdir()}  # with no PREEMPTED left
