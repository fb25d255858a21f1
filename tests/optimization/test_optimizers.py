"""Schedules are pure functions; the device skips updates with non-finite gradients, at hardly any cost for the host."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.compat import of_torch
from shared.config.options import Options
from shared.optimization import gradients
from shared.optimization.optimizers import (
    inner,
    make_optimizer,
    make_schedule,
    parameter_groups,
    step_if_finite,
)
from shared.options.data_options import ExtraOptions


def config(**values):
    return Options(**{"learning_rate": 0.1} | values)


@given(
    st.sampled_from(["linear", "cosine", "constant", "polynomial", "warmup_stable_decay"]),
    st.integers(1, 500),
    st.integers(0, 100),
)
def test_a_schedule_rises_to_the_peak_and_never_rises_again(kind, total, warmup):
    warmup = min(warmup, total - 1)
    rates = [make_schedule(config(lr_scheduler_type=kind, warmup_steps=warmup), total)(s) for s in range(total)]
    assert all(0 < rate <= 0.1 for rate in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup] == pytest.approx(0.1)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_schedules_have_the_expected_rates_at_the_start_the_peak_the_middle_and_the_end():
    at = {
        kind: make_schedule(config(lr_scheduler_type=kind, warmup_steps=None, warmup_ratio=0.1), 100)
        for kind in ("linear", "cosine", "constant", "polynomial")
    }
    assert all(schedule(10) == pytest.approx(0.1) for schedule in at.values())
    assert all(schedule(0) == pytest.approx(0.1 / 11) for schedule in at.values())
    assert [at[k](55) for k in at] == pytest.approx([0.05, 0.05, 0.1, 0.025])
    assert [at[k](100) for k in at] == pytest.approx([0, 0, 0.1, 0])


def test_warm_up_stable_decay_stays_at_the_peak_and_falls_as_one_minus_the_root():
    kind = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 10}
    schedule = make_schedule(config(**kind, decay_ratio=0.25), 100)
    assert [schedule(step) for step in (10, 40, 75)] == pytest.approx([0.1, 0.1, 0.1])
    assert [schedule(step) for step in (76, 79, 84, 91, 100)] == pytest.approx([0.08, 0.06, 0.04, 0.02, 0])
    default = make_schedule(config(**kind), 100)
    assert default(80) == pytest.approx(0.1)
    assert default(85) == pytest.approx(0.05)
    assert make_schedule(config(**kind, decay_ratio=0.0), 100)(99) == pytest.approx(0.1)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
def test_a_decay_from_a_step_falls_to_the_end_as_that_of_a_run_whose_decay_ratio_begins_there(start, steps, warmup):
    kind, total = {"lr_scheduler_type": "warmup_stable_decay"}, start + steps
    settings = ExtraOptions(**kind, learning_rate=0.1, decay_from=f"run/checkpoints/step_{start:08d}")
    branch = make_schedule(settings, total)
    whole = make_schedule(config(**kind, decay_ratio=steps / total, warmup_steps=min(warmup, start)), total)
    rates = [branch(step) for step in range(start, total)]
    assert rates == pytest.approx([whole(step) for step in range(start, total)])
    assert rates[0] == 0.1


def test_matrices_have_weight_decay_and_biases_and_norms_have_none():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight.requires_grad_(False)
    decay, rest = parameter_groups(model, 0.3)
    assert decay["weight_decay"] == 0.3
    assert [p.shape for p in decay["params"]] == [(5, 4)]
    assert rest["weight_decay"] == 0
    assert len(rest["params"]) == 3


def test_the_settings_of_adamw_are_torchs_defaults_or_those_of_the_flags():
    model = nn.Linear(4, 1)
    plain = make_optimizer(model, config()).defaults
    torchs = torch.optim.AdamW(model.parameters()).defaults
    assert all(plain[name] == torchs[name] for name in ("betas", "eps"))
    other = make_optimizer(model, config(adam_beta1=0.8, adam_beta2=0.98, adam_epsilon=1e-6)).defaults
    assert (other["betas"], other["eps"]) == ((0.8, 0.98), 1e-6)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])  # as on a GPU, where the device decides
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_a_skipped_update_has_no_effect_on_later_ones(accelerator, monkeypatch, optim, host):
    """torch allocates SGD's momentum before its kernel skips the update; here that memory is NaN."""
    monkeypatch.setattr(gradients, "HOST", host)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, math.nan))
    weights = []
    for factors in ([math.inf, 1.0, math.nan, 2.0], [1.0, 2.0]):
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
        optimizer = accelerator.prepare(make_optimizer(model, config(optim=optim)))
        for factor in factors:
            (model(torch.tensor([[1.0, 3.0, -2.0]])).sum() * factor).backward()
            norm = gradients.clip(accelerator, list(model.parameters()), 0.0)
            assert step_if_finite(accelerator, optimizer, norm).item() == (not math.isfinite(factor))
            gradients.set_to_none(list(model.parameters()))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.isfinite(weights[0]).all()
    assert torch.equal(*weights)


def test_momentum_allocated_before_the_first_step_changes_nothing():
    torch.manual_seed(0)
    ours, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    plain.load_state_dict(ours.state_dict())
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    settings = config(optim="sgd", weight_decay=0.1)
    torchs = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9, nesterov=True, fused=True)
    optimizers = {ours: make_optimizer(ours, settings), plain: torchs}
    for _ in range(3):
        batch = torch.randn(4, 5)
        for model, optimizer in optimizers.items():
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, plain.weight)
    assert torch.equal(ours.bias, plain.bias)


def test_an_optimizer_that_cannot_skip_on_the_device_checks_on_the_host(accelerator):
    model = nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False))
    assert not of_torch.reads_found_inf(torch.optim.RMSprop(model.parameters()))
    before = model.weight.clone()
    (model(torch.ones(1, 2)).sum() * math.nan).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert step_if_finite(accelerator, optimizer, norm).item() == 1
    assert torch.equal(before, model.weight)


@given(st.integers(0, 2**31), st.sampled_from([0.0, 1e-3, 1.0, 1e3]))
def test_clipped_gradients_equal_torchs_bit_for_bit(seed, max_norm):
    random = torch.Generator().manual_seed(seed)
    mine = [nn.Parameter(torch.zeros(size)) for size in ((3, 5), (70,), (2, 2), (1,))]
    theirs = [nn.Parameter(torch.zeros_like(p)) for p in mine]
    for one, other in zip(mine[:3], theirs, strict=False):  # the last has no gradient
        one.grad = torch.randn(one.shape, generator=random)
        other.grad = one.grad.clone()
    norm = gradients.clip(Accelerator(cpu=True), mine, max_norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm or math.inf))
    for one, other in zip(mine[:3], theirs, strict=False):
        assert torch.equal(one.grad, other.grad)
    assert mine[3].grad is None


FINITE, MOST = torch.tensor(1.0), 1.1  # times the calls of torch's scaler


def calls(function):
    """The number of calls, of Python functions and of functions written in C, that `function` makes."""
    counted = []
    sys.setprofile(lambda _, event, __: counted.append(event in ("call", "c_call")))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(counted)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_an_update_with_a_loss_scale_makes_hardly_more_calls_than_the_scaler_itself(optim):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = accelerator.prepare_optimizer(make_optimizer(model, Options(optim=optim, learning_rate=0.01)))
    scaler = torch.amp.GradScaler("cpu")
    scaled = SimpleNamespace(scaler=scaler, device=torch.device("cpu"), num_processes=1)
    parameters = list(model.parameters())

    def torch_only():
        scaler.step(inner(optimizer))
        scaler.update()

    found = []
    for update in (torch_only, lambda: step_if_finite(scaled, optimizer, FINITE)) * 2:  # the first makes the state
        before = model.weight.detach().clone()
        gradients.backward(scaled, model(torch.ones(1, 4)).sum())
        scaler.unscale_(inner(optimizer))
        found.append(calls(update))
        gradients.set_to_none(parameters)
        assert not torch.equal(model.weight, before)
    *_, alone, ours = found
    assert 0 < alone <= ours <= MOST * alone
    accelerator.free_memory()


@pytest.mark.parametrize("norm", [1.0, torch.inf])
def test_whether_an_update_was_skipped_is_known_on_the_device_even_if_the_gradients_are_on_the_host(norm):
    """The monitor sums it up together with the losses. `meta` stands for a device other than the host."""
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    accelerator = SimpleNamespace(scaler=None, device=torch.device("meta"))
    before = model.weight.detach().clone()
    skipped = step_if_finite(accelerator, make_optimizer(model, Options(learning_rate=0.01)), torch.tensor(norm))
    assert skipped.device.type == "meta"
    assert torch.equal(model.weight, before) == (norm == torch.inf)
