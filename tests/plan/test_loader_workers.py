"""Closing a loader or exiting the process ends the workers of the loader, and no other child process."""

import gc
import multiprocessing
import sys

import runs
import torch

from shared.plan.batches import Plan
from shared.plan.loading import Loader

CPU = torch.device("cpu")
SCRIPT = """
import multiprocessing, time
import psutil, torch
from shared.plan.batches import Plan
from shared.plan.loading import Loader


def ended(pid):
    try:
        return psutil.Process(pid).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def sleep_until_ended(pipe):
    workers = pipe.recv()
    while not all(map(ended, workers)):
        time.sleep(0.01)
    time.sleep(0.5)
    print(f"survived {len(workers)} workers\\n", end="", flush=True)


def pipe_and_child():
    here, there = multiprocessing.Pipe()
    return here, multiprocessing.Process(target=sleep_until_ended, args=(there,))


def main():
    pipes, children = zip(*(pipe_and_child() for _ in range(2)))
    children[0].start()
    plan = Plan(num_samples=10, seed=0, global_batch_size=2, num_epochs=9)
    loader = Loader(range(10), plan, torch.tensor, torch.device("cpu"), 2)
    micro_batches = loader.micro_batches(0)
    next(micro_batches)
    workers = {process.pid for process in multiprocessing.active_children()} - {children[0].pid}
    children[1].start()
    for pipe in pipes:
        pipe.send(workers)
    raise RuntimeError("in a step")


main()
"""


def test_child_processes_of_the_user_survive_and_the_workers_end():
    """The user starts one child before the workers, and one after them."""
    done = runs.run([sys.executable, "-c", SCRIPT], timeout=60)
    assert done.returncode == 1
    assert done.stdout == 2 * "survived 2 workers\n"
    assert done.stderr.endswith("RuntimeError: in a step\n")


def test_a_loader_ends_its_workers_when_it_is_closed_deleted_or_read_again():
    others = set(multiprocessing.active_children())
    loader = Loader(range(10), Plan(num_samples=10, seed=0, global_batch_size=2, num_epochs=9), torch.tensor, CPU, 2)
    next(loader.micro_batches(0))
    first = set(multiprocessing.active_children()) - others
    next(loader.micro_batches(5))
    second = set(multiprocessing.active_children()) - others
    assert len(first) == len(second) == 2
    assert not first & second
    loader.close()
    assert set(multiprocessing.active_children()) == others
    next(loader.micro_batches(0))
    gc.disable()
    try:
        del loader
    finally:
        gc.enable()
    assert set(multiprocessing.active_children()) == others
