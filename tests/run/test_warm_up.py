"""Discarded passes change no state; they find wrong losses, changing buffers, and parameters without gradients."""

import re
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from runs import refusal
from torch import nn

from shared.models.batch_norm import BatchNorm
from shared.models.trainable import FreezeUnreached
from shared.optimization.optimizers import parameter_groups
from shared.plan.batches import Plan
from shared.run.warm_up import check_loss, run_warm_up_pass


class Net(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        if unused:
            self.forgotten = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)


@contextmanager
def unchanged(model):
    """Parameters, buffers and torch's random state are the same after this context, and there are no gradients."""
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    yield
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())


def test_a_warm_up_pass_restores_parameters_buffers_gradients_and_random_state():
    torch.manual_seed(0)
    model = Net()
    with unchanged(model):
        run_warm_up_pass(Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum())


def test_parameters_without_a_gradient_are_named_unless_they_are_frozen():
    model = Net(unused=True)
    arguments = Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum()
    assert "forgotten.weight, forgotten.bias" in refusal(run_warm_up_pass, *arguments)
    model.forgotten.requires_grad_(False)
    run_warm_up_pass(*arguments)


class Routed(Net):
    """Sends a sample to one of its first two experts by the sign of its first number; a third expert is never used."""

    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        chosen = (x[:, 0] > 0).long()
        return sum(self.experts[i](x[chosen == i]).sum() for i in chosen.unique().tolist()) + self.body(x).sum()


def check(loss_of, model=None, processes=1):
    """Call `check_loss` for micro-batches of three samples; `loss_of` gets one of them and the losses of its rows.

    As in a run with the hook `BatchNorm`, the buffers of batch norms may change.
    """
    inputs = torch.randn(12, 4)
    model = (model or Net()).train()
    plan = Plan(num_samples=12, seed=0, global_batch_size=12, num_epochs=1, max_samples=3)
    accelerator = SimpleNamespace(num_processes=processes, device=torch.device("cpu"), autocast=nullcontext)
    averaged = BatchNorm().averaged_buffers(model)
    with unchanged(model):
        check_loss(accelerator, model, plan, lambda m: loss_of(m, model(inputs[m.samples]).square().mean(1)), averaged)


def test_the_sum_of_losses_over_the_normalizer_passes_and_no_state_changes():
    random_state = []

    def loss_of(m, losses):
        random_state.append(torch.get_rng_state())
        return losses.sum() / m.normalizer

    check(loss_of, processes=2)
    first, *others = random_state[:3]  # the last pass has more samples
    assert all(torch.equal(state, first) for state in others), "each pass has the same dropout"


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda m, losses: losses.mean(),
        lambda m, losses: losses.sum() / len(m.samples),
        lambda m, losses: losses.sum() / m.step_size,  # counts a repeat
        lambda m, losses: losses.sum() / m.normalizer + 0.01 * losses.mean(),  # a penalty for each micro-batch
    ],
)
def test_a_loss_that_does_not_fall_as_the_normalizer_grows_is_refused(loss_of):
    assert re.match(r"compute_loss gives .* for a repeat .*micro_batch\.normalizer", refusal(check, loss_of))


def test_a_mean_that_is_divided_by_the_normalizer_and_losses_of_all_pairs_are_refused():
    assert ", as a mean does: return the sum" in refusal(check, lambda m, losses: losses.mean() / m.normalizer)
    pairs = refusal(check, lambda m, losses: (losses[:, None] - torch.ones(len(losses))).sum() / m.normalizer)
    assert "for 3 copies, as losses [n, n] do, of predictions [n, 1] and targets [n]: return the sum" in pairs
    check(lambda m, losses: losses.sum() * (1 / m.normalizer + m.counted / m.step_samples))  # words and texts
    check(lambda m, losses: len(losses) * (1e-5 * losses.sum()).log1p() / m.normalizer)  # as a contrastive loss near 0
    model = Net()  # has no loss in evaluation mode
    check(lambda m, losses: losses.sum() * model.training / m.normalizer, model)


def test_buffers_that_change_in_each_forward_pass_are_refused_on_several_processes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    check(lambda m, losses: losses.sum() / m.normalizer, model)
    message = refusal(check, lambda m, losses: losses.sum() / m.normalizer, model, processes=2)
    assert re.match(r"the model changes 0\.parametrizations\.weight\.0\._u, .*start one process", message)


def freeze(model, inputs):
    """Call `FreezeUnreached` on a model whose samples are the rows of `inputs`; return the frozen parameters."""
    run = SimpleNamespace(plan=Plan(num_samples=len(inputs), seed=0, global_batch_size=4, num_epochs=1))
    run.accelerator, run.compute_loss = Accelerator(cpu=True), lambda m: model(inputs[m.samples]).sum()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    FreezeUnreached().placed(run, model)
    return [name for name, p in model.named_parameters() if name in trained and not p.requires_grad]


def test_parameters_that_the_loss_does_not_reach_are_frozen_printed_and_not_in_the_optimizer(capsys):
    torch.manual_seed(0)
    model = Net(unused=True).train()
    inputs = torch.randn(20, 4)
    with unchanged(model):
        assert freeze(model, inputs) == ["forgotten.weight", "forgotten.bias"]
    message = "frozen, because the loss does not depend on them: forgotten.weight, forgotten.bias\n"
    assert capsys.readouterr().out == message
    assert not model.forgotten.weight.requires_grad
    held = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert not [p for p in held if any(p is q for q in model.forgotten.parameters())]
    assert freeze(model, inputs) == [], "the loss reaches the others"
    run_warm_up_pass(Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum())


@pytest.mark.parametrize("experts", [2, 3], ids=["some batches reach it", "no batch reaches the third expert"])
def test_an_expert_that_the_first_batches_do_not_reach_is_refused_and_not_frozen(experts):
    inputs = torch.ones(20, 4)
    if experts == 2:
        inputs[np.linspace(0, 19, 8).astype(int)[4:], 0] = -1  # the last of the samples that are tried
    model = Routed(experts)
    assert re.search(r"only for some batches \(.*experts\.0\.weight", refusal(freeze, model, inputs))
    assert all(p.requires_grad for p in model.parameters())
