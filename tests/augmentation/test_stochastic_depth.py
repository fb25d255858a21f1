"""Stochastic depth leaves out each block as often as it should, and draws for each sample by itself."""

import numpy as np
import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from shared.augmentation.stochastic_depth import StochasticDepth
from shared.errors import UserError
from shared.images.image_models import freeze_backbone
from shared.plan.batches import MicroBatch

CPU = torch.device("cpu")


def resnet():
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=3)).train()


def micro_batch(samples, index=0):
    return MicroBatch(0, index, np.asarray(samples), np.zeros(len(samples), np.int64), len(samples))


def factors_of(depth, samples, index=0):
    depth.draw(micro_batch(samples, index), CPU)
    return torch.stack([branch.factors.flatten() for branch in depth.branches])


def test_later_blocks_are_left_out_more_often_and_the_mean_stays():
    factors = factors_of(StochasticDepth(resnet(), 0.8, 0), range(4000))
    assert factors.shape == (4, 4000)
    left_out = (factors == 0).double().mean(1)
    assert left_out.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.03)
    assert factors.double().mean(1).tolist() == pytest.approx([1] * 4, abs=0.1)
    assert np.abs(np.corrcoef(factors.numpy()) - np.eye(4)).max() < 0.08


def test_the_draws_of_a_sample_do_not_depend_on_its_micro_batch():
    depth = StochasticDepth(resnet(), 0.8, 0)
    together = factors_of(depth, [0, 1, 2, 3, 4, 5])
    apart = torch.cat([factors_of(depth, [4, 1], index=3), factors_of(depth, [5], index=1)], 1)
    assert torch.equal(together[:, [4, 1, 5]], apart)
    assert not torch.equal(factors_of(StochasticDepth(resnet(), 0.8, 1), range(6)), together)


def test_a_block_gives_the_shortcut_or_the_scaled_branch_and_in_evaluation_the_plain_one():
    plain, model = resnet(), resnet()
    depth = StochasticDepth(model, 0.5, 0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    depth.draw(micro_batch(range(8)), CPU)
    block, like = model.resnet.encoder.stages[1].layers[1], plain.resnet.encoder.stages[1].layers[1]
    images = torch.randn(8, 8, 4, 4)
    kept = depth.branches[-1].factors
    assert set(kept.flatten().tolist()) == {0.0, 2.0}
    assert torch.allclose(block(images), torch.relu(images + kept * like.layer(images)), atol=1e-6)
    assert torch.equal(block.eval()(images), like.eval()(images))


def test_it_needs_the_blocks_of_a_resnet_that_train():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    vit = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
    assert StochasticDepth(vit, 0.0, 0).branches == []
    frozen = resnet()
    freeze_backbone(frozen)
    for model in (vit, frozen):
        with pytest.raises(UserError, match=r"--stochastic_depth 0\.1 needs a ResNet whose blocks are trained"):
            StochasticDepth(model, 0.1, 0)
