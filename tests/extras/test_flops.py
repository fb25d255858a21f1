"""The number of FLOPs that a model needs for its real tokens."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from monitored_steps import LENGTHS, WENT_WELL, monitor, plan
from torch.utils.checkpoint import checkpoint

from shared.extras import flops
from shared.extras.flops import attention_flops, count_flops
from shared.options.data_options import ModelOptions


def test_attention_flops_are_12_times_layers_times_hidden_size():
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(num_hidden_layers=2, hidden_size=8)
    assert attention_flops(model) == 12 * 2 * 8
    assert attention_flops(torch.nn.Linear(1, 1)) == 0


def test_convolutions_count_each_output_with_its_kernel():
    model = torch.nn.Conv2d(4, 6, 3, groups=2)
    images = torch.ones(2, 4, 10, 10, requires_grad=True)
    assert count_flops(model, lambda: model(images), is_sequence=False) == 3 * 2 * (6 * 8 * 8) * (4 // 2 * 3 * 3)
    assert not {**model._forward_hooks, **model._forward_pre_hooks}


def test_a_router_that_gives_several_tensors_does_not_count(monkeypatch):
    router = torch.nn.Linear(2, 2)
    monkeypatch.setattr(router, "forward", lambda inputs: (inputs, inputs))
    assert count_flops(router, lambda: router(torch.ones(3, 2)), is_sequence=False) == 0


# `saved` is to be multiplied by 2 FLOPs and 7 rows.
@pytest.mark.parametrize(("frozen", "saved"), [((), 0), ((0,), 2 * 12), ((1,), 20), ((0, 1), 2 * (12 + 20))])
def test_frozen_weights_save_products_of_the_backward_pass(frozen, saved):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    for index in frozen:
        model[index].requires_grad_(False)
    found = count_flops(model, lambda: model(torch.ones(7, 3)), is_sequence=False)
    assert found == 2 * (3 * (12 + 20 + 10) - saved)


class Recomputing(torch.nn.Module):
    """A model whose inner layers are computed again in the backward pass if `again`, as far as gradients need them."""

    def __init__(self, again):
        super().__init__()
        self.first, self.again = torch.nn.Linear(3, 5), again
        self.inside = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))

    def forward(self, ids):
        hidden = self.first(torch.ones(*ids.shape, 3))
        return checkpoint(self.inside, hidden, use_reentrant=False) if self.again else self.inside(hidden)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_recomputed_layers_count_once(accelerator, clock, again):
    """This holds over several micro-batches, and after an evaluation and a pass without gradients of the same model."""
    model = Recomputing(again)
    watch = monitor(accelerator, model=model)
    model.eval()(torch.zeros(7, 7))
    model.train()
    with torch.no_grad():
        model(torch.zeros(9, 9))
    real = area = 0
    for piece in plan(micro_batches_per_step=3).micro_batches(0):
        out = model(torch.zeros(len(piece.samples), int(LENGTHS[piece.samples].max())))
        out.sum().backward()
        watch.add(piece, out.sum())
        real, area = real + LENGTHS[piece.samples].sum(), area + out[..., 0].numel()
    watch.end_step(WENT_WELL)
    clock[0] += 2
    figures = watch.read()
    assert figures["mfu"] == pytest.approx(3 * 2 * (3 * 5 + 2 * 5 * 7) * real / 2 / 1e12)
    assert figures["padding"] == pytest.approx(1 - real / area)


def test_the_peak_is_that_of_the_fastest_product(monkeypatch):
    times = itertools.accumulate(itertools.chain([0, 9, 9, 0.125], itertools.repeat(9)))
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=times.__next__))
    assert flops.measure_peak(torch.device("cpu"), "bf16") == 2 * flops.SIDES["cpu"][0] ** 3 / 0.125


@pytest.mark.parametrize(
    ("settings", "instructions", "gain", "noted"),
    [({}, True, 2.34, True), ({}, True, 1.2, False), ({}, False, 2.34, False)]
    + [(settings, True, 2.34, False) for settings in ({"activation_dtype": "bf16"}, {"peak_tflops": 1.0})],
)
def test_the_launch_card_says_what_bf16_would_gain_where_it_gains(monkeypatch, settings, instructions, gain, noted):
    rates = {"no": 1e11, "bf16": gain * 1e11}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": instructions})
    monkeypatch.setattr(flops, "measure_peak", lambda _, precision: rates[precision])
    accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision="no")
    run = SimpleNamespace(accelerator=accelerator, config=ModelOptions(**settings), card={})
    flops.peak_of_device(run)
    said = run.card.get("note on precision", "")
    assert ("2.3 times as fast here with --mixed_precision bf16" in said) == noted
    assert bool(said) == noted
