"""Changes to the code of recipes/image_classification.py and to compiling, for the variants of benchmarks/gpu.py."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.augmentation import augmentation
from shared.augmentation.augmentation import Augmentation, mixed_cross_entropy, per_channel
from shared.images import image_models


def with_compiled_loss(replace: Any, recipe: Any) -> None:
    """Compile the loss, whose operations then need one pass over the logits instead of several."""
    replace(recipe, "mixed_cross_entropy", torch.compile(mixed_cross_entropy, dynamic=False))


def with_compiled_augmentation(replace: Any, recipe: Any) -> None:
    """Compile cropping and normalization together, so the crop waits for the latter. Nothing can be between the two.

    The evaluation, which does not crop, stays as it is.
    """
    normalize, crop = Augmentation.normalize, augmentation.crop_and_resize

    @torch.compile(dynamic=False)
    def both(mean: Tensor, std: Tensor, *images_and_boxes: Any) -> Tensor:
        return crop(*images_and_boxes).div(255).sub(mean).div(std)

    def normalize_crops(how: Augmentation, images: Any) -> Tensor:
        if isinstance(images, Tensor):
            return normalize(how, images)
        mean, std = (per_channel(values, images[0].device) for values in (how.geometry.mean, how.geometry.std))
        made, last = both(mean, std, *images), images[0].is_cuda and how.config.channels_last
        return made.to(memory_format=torch.channels_last) if last else made

    replace(augmentation, "crop_and_resize", lambda *images_and_boxes: images_and_boxes)
    replace(Augmentation, "normalize", normalize_crops)


def with_whole_model_compiled(replace: Any, recipe: Any) -> None:
    """Compile the model as a whole, where the recipe compiles its repeated layers."""

    def compile_whole(config: Any, model: torch.nn.Module, fixed_shapes: bool = False) -> torch.nn.Module:
        if config.torch_compile:
            model.compile(dynamic=False)
        return model

    replace(image_models, "compile_layers", compile_whole)


def with_fixed_sizes(replace: Any, recipe: Any) -> None:
    """Compile for each size apart."""
    compile_module = torch.nn.Module.compile
    replace(torch.nn.Module, "compile", lambda self, **given: compile_module(self, **given | {"dynamic": False}))


def with_cudnn_attention(replace: Any, recipe: Any) -> None:
    """Compute attention by cuDNN where it can, which torch does by itself on some GPUs only."""
    main = recipe.main

    def main_with_cudnn(config: Any) -> Any:
        first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel([*first, SDPBackend.MATH], set_priority=True):
            return main(config)

    replace(recipe, "main", main_with_cudnn)
    replace(torch.backends.cuda, "enable_cudnn_sdp", lambda _: None)  # by which a run switches it off at its start


def with_plain_optimizer(replace: Any, recipe: Any) -> None:
    """SGD or AdamW with an operation over all parameters at a time, as torch does by default."""
    make_fused = recipe.make_optimizer

    def make_optimizer(model: Any, config: Any) -> Any:
        fused = make_fused(model, config)
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in fused.param_groups]
        first = fused.param_groups[0]
        settings = {name: first[name] for name in ("lr", "betas", "eps", "momentum", "nesterov") if name in first}
        return type(fused)(groups, **settings, foreach=True)

    replace(recipe, "make_optimizer", make_optimizer)


CHANGES = {
    "compiled_loss": with_compiled_loss,
    "compiled_augmentation": with_compiled_augmentation,
    "whole_model": with_whole_model_compiled,
    "fixed_sizes": with_fixed_sizes,
    "cudnn_attention": with_cudnn_attention,
    "plain_optimizer": with_plain_optimizer,
}
