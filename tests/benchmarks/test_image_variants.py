"""The changes of the image variants of benchmarks/gpu.py compute the same as the recipe.

Most tests trace without code generation, because a C++ compiler takes a minute.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.harness import image_variants
from shared.augmentation.augmentation import Augmentation, AugmentationOptions, Targets, mixed_cross_entropy
from shared.images.decoding import Geometry
from shared.models.optimizers import make_optimizer
from shared.plan.batches import MicroBatch

GEOMETRY = Geometry(size=12, resize=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), interpolation="bilinear")


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.campaign)])
def changed(request, monkeypatch):
    """A function that applies a change and returns what then stands in for the recipe."""
    monkeypatch.setattr(image_variants, "BACKEND", request.param)
    torch._dynamo.reset()
    recipe = SimpleNamespace(mixed_cross_entropy=mixed_cross_entropy, make_optimizer=make_optimizer)

    def call(name):
        image_variants.CHANGES[name](monkeypatch.setattr, recipe)
        return recipe

    yield call
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["probabilities", "compiled_loss"])
def test_the_loss_is_the_same(changed, name):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5), torch.randint(5, (6,))
    both = Targets(labels), Targets(labels, labels.roll(1), torch.rand(6))
    compute = changed(name).mixed_cross_entropy
    for targets in both:
        assert torch.allclose(compute(logits, targets, 0.1), mixed_cross_entropy(logits, targets, 0.1), atol=1e-6)


def test_augmentation_is_the_same(changed):
    rng, rows = np.random.default_rng(0), np.arange(4)
    images = torch.from_numpy(rng.integers(0, 256, (4, 16, 16, 3), np.uint8))
    batch = {"images": images, "aspects": torch.linspace(0.5, 2, 4), "labels": torch.arange(4)}
    micro_batch = MicroBatch(0, 0, rows, np.zeros_like(rows), len(rows))
    how = Augmentation(AugmentationOptions(min_crop_area=0.3, horizontal_flip=True), GEOMETRY)
    expected = how.training(micro_batch, batch)[0], how.evaluation(batch)
    changed("compiled_augmentation")
    found = how.training(micro_batch, batch)[0], how.evaluation(batch)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_updates_of_sgd_are_the_same(changed):
    config = SimpleNamespace(
        optim="sgd", weight_decay=0.1, layer_lr_decay=None, learning_rate=0.1, LEARNING_RATES=(0.1, 0.1)
    )
    make_plain = changed("plain_optimizer").make_optimizer
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model, config) for make, model in zip((make_optimizer, make_plain), models, strict=True)]
    assert [group.get("fused") for each in optimizers for group in each.param_groups] == [True, True, None, None]
    for _ in range(3):
        batch = torch.randn(4, 5)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
