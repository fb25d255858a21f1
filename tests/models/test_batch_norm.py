"""Running averages are updated once per step with the statistics of all micro-batches; frozen ones do not change.

tests/recipes/test_exactness.py compares them with those of a second implementation.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.errors import UserError
from shared.models.batch_norm import STEPS_AT_ONCE, BatchNorm, notes, synchronize
from shared.plan.batches import MicroBatch, Plan

SIZES = (5, 2, 3)  # micro-batches of a step


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))


def micro_batches():
    torch.manual_seed(1)
    ids = np.arange(10)
    for index, size in enumerate(SIZES):
        yield (
            MicroBatch(0, index, ids[:size], ids[:size], 10, step_samples=10),
            torch.randn(size, 3, 8, 8) * (1 + index) + index,
        )


def given(net, **settings):
    """The hook of a run that has this model, and that run."""
    plan = Plan(num_samples=64, seed=0, global_batch_size=64, num_epochs=1, **settings)
    run = SimpleNamespace(accelerator=Accelerator(cpu=True), model=net, plan=plan, card={})
    run.progress = SimpleNamespace(step=0)
    averages = BatchNorm()
    averages.given(run, net)
    return averages, run


def averages_of(net):
    averages, run = given(net)
    averages.loaded(run)
    return averages


def step(net, averages, pieces=None, grad_norm=1.0, settle=True):
    for micro_batch, images in pieces or micro_batches():
        net(images)
        averages.counted(micro_batch)
    averages.updated(torch.tensor(grad_norm))
    if settle:
        averages.weights_are_read()


def buffers(net):
    return torch.cat([b.flatten().double() for name, b in net.named_buffers() if "running" in name])


def test_a_repeat_that_is_not_counted_does_not_change_the_averages():
    net, other = model().train(), model().train()
    step(net, averages_of(net))
    repeat = MicroBatch(0, 3, *np.arange(2).reshape(2, 1), 10, counted=False), torch.full((2, 3, 8, 8), 100.0)
    step(other, averages_of(other), [*micro_batches(), repeat])
    assert torch.equal(buffers(net), buffers(other))


def test_a_skipped_update_does_not_change_the_averages():
    net = model().train()
    averages = averages_of(net)
    step(net, averages)
    before = buffers(net)
    step(net, averages, [(micro_batch, images * torch.nan) for micro_batch, images in micro_batches()], torch.nan)
    assert torch.equal(buffers(net), before)
    step(net, averages)
    assert torch.isfinite(buffers(net)).all()


def test_norms_in_eval_mode_do_not_change():
    net = model().train()
    net[1].eval()
    frozen, moving = net[1].running_mean.clone(), net[4].running_mean.clone()
    step(net, averages_of(net))
    assert torch.equal(net[1].running_mean, frozen)
    assert not torch.equal(net[4].running_mean, moving)


def test_the_averages_do_not_depend_on_when_they_are_read():
    net, other = model().train(), model().train()
    averages, others = averages_of(net), averages_of(other)
    for _ in range(STEPS_AT_ONCE + 3):
        step(net, averages)
        step(other, others, settle=False)
    others.weights_are_read()
    assert torch.equal(buffers(net), buffers(other))
    assert net[1].num_batches_tracked == other[4].num_batches_tracked == STEPS_AT_ONCE + 3


def test_small_micro_batches_of_norms_that_are_not_synchronized_are_noted():
    net = model().train()
    few, enough = (Plan(num_samples=64, seed=0, global_batch_size=64, num_epochs=1, max_samples=n) for n in (8, 16))
    assert "micro-batches of 8 samples" in notes(net, few, 0)["batch norm"]
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model().train())
    assert notes(net, enough, 0) == notes(net.eval(), few, 0) == notes(synchronized, few, 0) == {}


def test_synchronized_norms_give_every_process_the_same_number_of_micro_batches():
    for net, equal in ((model(), False), (nn.SyncBatchNorm.convert_sync_batchnorm(model()), True)):
        _, run = given(net.train(), num_processes=2)
        assert run.plan.equal_counts == equal
        assert bool(run.plan.depends_on_processes) == equal


def test_norms_without_momentum_and_synchronization_without_norms_are_refused():
    with pytest.raises(UserError, match=r"momentum=None .*set momentum=0\.1"):
        given(nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(UserError, match="no effect on a model without batch norm"):
        synchronize(nn.Linear(2, 2))


def test_weights_of_samples_do_not_change_the_averages():
    """The normalizer of the loss is then the sum of the weights; the averages still count samples."""
    found = []
    for weights in (None, np.arange(1.0, 11.0)):
        net = model().train()
        averages = averages_of(net)
        plan = Plan(num_samples=10, seed=0, global_batch_size=10, num_epochs=1, weights=weights, max_samples=5)
        torch.manual_seed(2)
        pieces = [(piece, torch.randn(len(piece.samples), 3, 8, 8)) for piece in plan.micro_batches(0)]
        step(net, averages, pieces)
        found.append(buffers(net))
    assert torch.equal(*found)
