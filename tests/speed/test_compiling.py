"""--torch_compile works in place and gives the same losses, on any number of processes and after a kill.

The tests use torch's "aot_eager", which does everything except code generation, because a C++ compiler takes a minute.
Tests of `make campaign` and on GPUs use the real compiler.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from families import MASKED_LM, compiled, small
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from shared.extras.flops import Mfu, count_flops
from shared.models.trainable import called_layers
from shared.options.data_options import ModelOptions
from shared.plan.batches import Plan
from shared.speed import layers
from shared.speed.layers import compile_layers

CONFIG = ModelOptions(torch_compile=True)


@pytest.fixture
def quick(monkeypatch):
    """Use a backend without code generation, and forget what was compiled before."""
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()


def bert():
    return small("bert", MASKED_LM)


def ids(rows, length):
    return torch.arange(rows * length).view(rows, length) % 50


def test_compiled_layers_give_the_same_losses_and_gradients_and_share_one_graph(quick, monkeypatch):
    from torch._dynamo.utils import counters

    counters.clear()
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    plain, model = bert(), compile_layers(CONFIG, bert())
    assert not torch._dynamo.config.optimize_ddp, "DDP does not split compiled layers"
    assert compiled(model)
    assert not compiled(compile_layers(ModelOptions(), plain)), "without the flag"
    assert set(model.state_dict()) == set(plain.state_dict()), "the names of the weights are unchanged"
    for rows, length in ((4, 7), (3, 9), (5, 6), (2, 12)):
        losses = [m(ids(rows, length)).logits.square().mean() for m in (plain, model)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for loss in losses:
            loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            assert runs.distance(other.grad, one.grad) < 1e-5 or one.grad.norm() < 1e-6


def test_an_image_model_compiles_once_for_each_number_of_rows_without_symbolic_shapes(quick):
    from torch._dynamo.utils import counters

    counters.clear()
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]))
    plain = copy.deepcopy(resnet)
    model = compile_layers(CONFIG, resnet, fixed_shapes=True)
    stages = len(called_layers(model))
    for compiled_before, rows in enumerate((4, 3, 4, 3)):
        images = torch.randn(rows, 3, 16, 16)
        assert torch.allclose(model(pixel_values=images).logits, plain(pixel_values=images).logits, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == stages * min(compiled_before + 1, 2)


def test_flops_of_compiled_layers_are_counted_and_the_random_state_does_not_change(accelerator, quick, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", "eager")  # only the hooks matter here; compiled layers do not run them
    plain, model, random_state = bert(), compile_layers(CONFIG, bert()), torch.get_rng_state()
    plan = Plan(lengths=np.full(4, 5), seed=0, global_batch_size=2, max_steps=1)
    run = SimpleNamespace(accelerator=accelerator, config=ModelOptions(peak_tflops=1.0), lengths=plan.lengths)
    run.model, run.plan, run.compute_loss, mfu = model, plan, lambda _: model(ids(2, 5)), Mfu()
    mfu.prepared(run)
    assert mfu.per_position == count_flops(plain, lambda: plain(ids(2, 5))) > 0
    assert count_flops(plain.eval(), lambda: plain(ids(4, 5))) == 0, "evaluations are not counted"
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_without_layers_is_refused_in_one_line():
    message = runs.refusal(compile_layers, CONFIG, nn.Linear(1, 1))
    assert message.startswith("--torch_compile finds no repeated layers in a Linear")


@pytest.mark.docs  # whole runs take long
def test_a_compiled_run_equals_the_eager_one_up_to_rounding_and_resumes_bit_identically(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    base, middle = [*runs.TINY_IMAGES, "--checkpointing_steps", 4], tmp_path / "compiled/checkpoints/step_00000004"
    jobs = {"eager": base, "compiled": [*base, "--torch_compile"]}
    jobs["resumed"] = [*jobs["compiled"], "--resume_from_checkpoint", middle]
    for name, flags in jobs.items():
        runs.train("image_classification", tmp_path / name, *flags)
    eager, compiled, resumed = (runs.weights(tmp_path / name) for name in jobs)
    assert runs.distance(compiled, eager) < 1e-5
    assert torch.equal(resumed, compiled)
    assert [line["step"] for line in runs.training_lines(tmp_path / "resumed")] == [6, 8]
    assert min(line["mfu"] for line in runs.training_lines(tmp_path / "compiled")) > 0


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", ["nlp", "mlm", "image_classification"])
def test_generated_code_trains_the_same_on_one_process_and_on_two(texts, tmp_path, recipe):
    base = runs.TINY_IMAGES if recipe == "image_classification" else [*texts, *runs.TINY]
    path = f"recipes/{recipe}.py"
    outputs = runs.run_many(1, {"eager": base, "compiled": [*base, "--torch_compile"]}, tmp_path, path)
    outputs |= runs.run_many(2, {"two": [*base, "--torch_compile"]}, tmp_path, path)
    eager = runs.weights(outputs["eager"])
    found = {name: runs.distance(runs.weights(outputs[name]), eager) for name in ("compiled", "two")}
    print(found)  # for docs/faster_runs.md
    assert max(found.values()) < 1e-5
