"""The loader yields the samples of the plan with the same random numbers anywhere, reads ahead, ends its workers."""

import gc
import multiprocessing
import random
import sys

import numpy as np
import pytest
import runs
import torch
from torch.utils.data import Dataset, default_collate

from shared.plan import loading
from shared.plan.batches import Plan
from shared.plan.draws import seed_dropout
from shared.plan.loading import InMemory, Loader
from shared.text.remote_tokens import begun_ahead

CPU = torch.device("cpu")


class Draws(Dataset):
    """Each sample is its number and one draw from each of the three generators, as in augmentation code."""

    def __len__(self):
        return 23

    def __getitem__(self, i):
        return torch.tensor([i, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


def fed(plan, dataset, num_workers=0, collate_fn=default_collate, steps=None):
    loader = Loader(dataset, plan, collate_fn, CPU, num_workers)
    return [pair for step in (steps or range(plan.total_steps)) for pair in loader.micro_batches(step)]


def plan_of(n, **arguments):
    return Plan(**{"num_samples": n, "seed": 3, "global_batch_size": 8, "num_epochs": 2, "max_samples": 3} | arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_the_samples_of_the_plan(num_workers):
    plan = plan_of(23)
    pairs = fed(plan, Draws(), num_workers)
    planned = [m for step in range(plan.total_steps) for m in plan.micro_batches(step)]
    assert [m.samples.tolist() for m, _ in pairs] == [m.samples.tolist() for m in planned]
    assert all(batch[:, 0].tolist() == m.samples.tolist() for m, batch in pairs)


def test_draws_depend_on_seed_epoch_and_sample_only():
    def draws(num_workers=0, **arguments):
        table = {}
        for micro_batch, batch in fed(plan_of(23, **arguments), Draws(), num_workers):
            for epoch, row in zip(micro_batch.epochs.tolist(), batch.tolist(), strict=True):
                table[epoch, int(row[0])] = row[1:]
        return table

    alone = draws()
    assert len(alone) == 46
    assert draws(num_workers=2) == alone
    assert draws(max_samples=5, global_batch_size=7) == alone
    halves = draws(num_processes=2) | draws(num_processes=2, process_index=1)
    assert halves == alone
    assert len({tuple(row) for row in alone.values()}) == 46, "two samples or epochs drew the same"
    assert draws(seed=4) != alone


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_step_can_be_read_directly_and_repeatedly(num_workers):
    plan = plan_of(23)
    loader = Loader(Draws(), plan, default_collate, CPU, num_workers)
    everything = [[b.tolist() for _, b in loader.micro_batches(step)] for step in range(plan.total_steps)]
    next(loader.micro_batches(1))  # left early
    for step in (4, 1, 2):
        assert [b.tolist() for _, b in loader.micro_batches(step)] == everything[step]


def test_a_dataset_without_random_draws_is_not_seeded_and_a_subclass_that_may_draw_is(monkeypatch):
    seeded = []
    monkeypatch.setattr(loading, "seed_sample", lambda *words: seeded.append(words))

    class Augmented(InMemory):
        def __getitem__(self, i):
            return super().__getitem__(i)

    still = Augmented(torch.zeros(23))
    still.draws_random = False
    for data in (InMemory(torch.zeros(23)), still):
        fed(plan_of(23), data)
    assert not seeded
    fed(plan_of(23), Augmented(torch.zeros(23)))
    assert len(seeded) == 46


def test_a_collate_function_is_seeded_if_its_own_class_does_not_say_that_it_draws_nothing(monkeypatch):
    seeded, plan, data = [], plan_of(23), InMemory(torch.zeros(23))
    still = type("Still", (), {"draws_random": False, "__call__": lambda self, rows: default_collate(rows)})
    monkeypatch.setattr(loading, "seed_micro_batch", lambda *words: seeded.append(words))
    for collate in (still(), type("Noisy", (still,), {})()):
        fed(plan, data, collate_fn=collate, steps=[0])
    assert len(seeded) == 3 * len(plan.micro_batches(0))


def test_time_spent_waiting_is_counted():
    loader = Loader(Draws(), plan_of(23), default_collate, CPU)
    list(loader.micro_batches(0))
    assert 0 < loader.seconds_waited < 10


def test_dropout_depends_on_seed_step_and_micro_batch_and_not_on_earlier_draws():
    def draw(*words):
        seed_dropout(CPU, *words)
        return torch.rand(3).tolist()

    first = draw(0, 1, 2)
    others = [draw(1, 1, 2), draw(0, 2, 2), draw(0, 1, 3), draw(0, 2, 1)]
    assert first not in others
    assert draw(0, 1, 2) == first


SCRIPT = """
import multiprocessing, time
import psutil, torch
from shared.plan.batches import Plan
from shared.plan.loading import Loader


def outlive(pids):
    workers = pids.get()
    psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)])
    time.sleep(0.5)
    print(f"survived {len(workers)} workers\\n", end="", flush=True)


pids = multiprocessing.Queue()
before, after = (multiprocessing.Process(target=outlive, args=(pids,)) for _ in range(2))
before.start()
plan = Plan(num_samples=10, seed=0, global_batch_size=2, num_epochs=9)
loader = Loader(range(10), plan, torch.tensor, torch.device("cpu"), 2)
next(loader.micro_batches(0))
workers = [process.pid for process in multiprocessing.active_children() if process != before]
after.start()
for _ in range(2):
    pids.put(workers)
raise RuntimeError("in a step")
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


class Elsewhere(Dataset):
    """Notes the samples that were asked for ahead, and how many of them had been when one was read."""

    def __init__(self):
        self.asked, self.read = [], []

    def __len__(self):
        return 100

    def read_ahead(self, schedule):
        return begun_ahead(lambda samples: self.asked.extend(samples.tolist()), schedule, 20)

    def read_micro_batch(self, samples, epochs):
        self.read += samples.tolist()
        assert self.asked[: len(self.read)] == self.read
        return len(self.asked) - len(self.read)


@pytest.mark.parametrize("rows", [5, 50], ids=["small micro-batches", "micro-batches larger than the window"])
def test_the_next_samples_are_asked_for_in_the_order_of_the_plan(rows):
    data = Elsewhere()
    plan = Plan(num_samples=100, seed=1, global_batch_size=50, num_epochs=2, max_samples=rows)
    pairs = fed(plan, data, collate_fn=lambda ahead: ahead)
    planned = [m.samples for step in range(plan.total_steps) for m in plan.micro_batches(step)]
    assert data.read == data.asked == np.concatenate(planned).tolist()
    ahead = [found for _, found in pairs]
    assert min(ahead[: -20 // rows - 1]) >= min(20, rows)
    assert max(ahead) <= max(20, rows)
    assert ahead[-1] == 0


def test_a_step_out_of_order_begins_anew():
    data = Elsewhere()
    plan = Plan(num_samples=100, seed=1, global_batch_size=10, num_epochs=1)
    loader = Loader(data, plan, lambda ahead: ahead, torch.device("cpu"))
    list(loader.micro_batches(0))
    data.asked, data.read = [], []
    ((micro_batch, _),) = loader.micro_batches(7)
    assert data.read == micro_batch.samples.tolist() == plan.micro_batches(7)[0].samples.tolist()
