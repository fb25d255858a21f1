"""Flags for convolutions on a GPU: channels-last computes the same, and cuDNN's benchmark is refused on a CPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from shared.errors import UserError
from shared.images.image_models import adapt_to_device
from shared.options.image_options import ImageOptions

ON_GPU = SimpleNamespace(device=torch.device("cuda"))  # nothing is moved there


def resnet():
    torch.manual_seed(0)
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    )


def config(**changed):
    return SimpleNamespace(**vars(ImageOptions()) | {"channels_last": True} | changed)


def test_channels_last_gives_the_same_logits_and_gradients():
    first = resnet()
    last = adapt_to_device(ON_GPU, config(), copy.deepcopy(first))
    kernels = [p for p in last.parameters() if p.ndim == 4 and p.shape[2] > 1]
    assert kernels
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
    images = torch.randn(4, 3, 32, 32)
    logits = [
        model.train()(pixel_values=images.to(memory_format=order)).logits
        for model, order in ((first, torch.contiguous_format), (last, torch.channels_last))
    ]
    assert torch.allclose(*logits, atol=1e-5)
    for each in logits:
        each.square().sum().backward()
    for p, q in zip(first.parameters(), last.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5 * float(p.grad.norm()))


def test_cudnn_benchmark_is_on_only_with_its_flag_and_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for flag in (False, True):
        adapt_to_device(ON_GPU, config(cudnn_benchmark=flag), resnet())
        assert torch.backends.cudnn.benchmark is flag
    with pytest.raises(UserError, match="--cudnn_benchmark needs a GPU"):
        adapt_to_device(SimpleNamespace(device=torch.device("cpu")), config(cudnn_benchmark=True), resnet())
