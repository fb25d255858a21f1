"""Image classifiers and their image processors, pretrained or made from a transformers config."""

from types import MethodType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from shared.errors import UserError, about, say
from shared.images.decoding import Geometry
from shared.models.batch_norm import synchronize
from shared.models.linear_layers import use_fast_products
from shared.models.trainable import backbone
from shared.models.transformers_models import check_loads
from shared.pretrained.from_pretrained import head_for, load_classifier, load_pretrained
from shared.speed.first_token import shorten_last_layer
from shared.speed.layers import compile_layers, use_activation_dtype
from shared.speed.self_check import in_eval_mode

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_geometry(config: Any) -> Geometry:
    """The geometry of the images of a config. --image_size and --resize_size override that of --model_name_or_path.

    A pretrained model without an image processor has the size of its config, and the normalization of ImageNet.

    Raises:
        UserError: no size is known, or the image processor cannot be loaded or reproduced: see `geometry_of`.
    """
    size = config.image_size or 16
    if config.model_name_or_path is not None:
        try:
            given = load_pretrained("AutoImageProcessor", config.model_name_or_path, config.revision, backend="pil")
            return geometry_of(given, config)
        except UserError as error:
            if "Can't load image processor" not in str(error):  # transformers' message for a missing file
                raise
        name = f"--model_name_or_path {config.model_name_or_path} has no image processor"
        sizes = load_pretrained("AutoConfig", config.model_name_or_path, config.revision)
        size = config.image_size or getattr(getattr(sizes, "vision_config", sizes), "image_size", None)
        if not isinstance(size, int):
            raise UserError(f"{name}, and its config has no image_size: give --image_size")
        say(f"{name}: images are {size} x {size}, normalized as for ImageNet")
    return Geometry(size, config.resize_size or size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")


def image_processor(geometry: Geometry) -> Any:
    """The image processor to export with a model. It makes the same images as the evaluation."""
    from transformers import BitImageProcessorPil

    crop = {"height": geometry.size, "width": geometry.size}
    return BitImageProcessorPil(
        size=crop if geometry.resize is None else {"shortest_edge": geometry.resize},
        do_center_crop=geometry.resize is not None,
        crop_size=crop,
        image_mean=list(geometry.mean),
        image_std=list(geometry.std),
        resample=Image.Resampling[geometry.interpolation.upper()],
    )


def geometry_of(processor: Any, config: Any) -> Geometry:
    """The geometry of a pretrained image processor.

    Raises:
        UserError: its size or its normalization is of an unknown kind.
    """
    name = f"--model_name_or_path {config.model_name_or_path}"
    edges = dict(processor.size or {})
    crop = dict(getattr(processor, "crop_size", None) or {}) if getattr(processor, "do_center_crop", False) else {}
    share = getattr(processor, "crop_pct", None)
    side = edges.get("shortest_edge") or edges.get("height")
    if not side or edges.get("width", side) != side or (crop and crop.get("height", 0) != crop.get("width")):
        raise UserError(f"{name}: its image processor makes no squares ({edges}, {crop}): use another model")
    size: int = crop["height"] if crop else side
    resize: int | None = None
    if crop:
        resize = max(size, int(side / share) if share else side)  # transformers rounds down
    elif "shortest_edge" in edges and share and side < 384:  # ConvNeXt's processor; from 384 on it squeezes
        resize = int(side / share)
    if config.image_size:
        resize = resize and round(resize * config.image_size / size)
        size = config.image_size
    interpolation = Image.Resampling(processor.resample).name.lower()
    if interpolation not in ("bilinear", "bicubic"):
        interpolation = "bicubic"
        say(f"{name}: its image processor uses an unknown resampling ({processor.resample}): bicubic is used instead")
    return Geometry(size, config.resize_size or resize, *normalization_of(processor, name), interpolation)


def normalization_of(processor: Any, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation of each channel (for values 0 ... 1) that an image processor really applies.

    They are measured on images of one color, because the processor's attributes can be wrong: EfficientNet's processor
    divides twice, others first subtract one half.

    Raises:
        UserError: the processor does not make images of three channels, or does more than normalize each channel.
    """
    colors = np.concatenate([np.zeros((1, 3), np.uint8), 255 * np.eye(3, dtype=np.uint8)])
    images = [np.tile(color, (64, 64, 1)) for color in colors]
    with about(f"{name}: its image processor makes no images"):  # but tokens or patches
        made = np.stack([processor(images=image, return_tensors="np")["pixel_values"][0] for image in images])
        middle = made[:, :, made.shape[2] // 2, made.shape[3] // 2].astype(float)  # [4, 3]
    gain = middle[1:] - middle[0]
    if made.shape[1] == 3 and np.allclose(gain[::-1], np.diag(np.diag(gain[::-1]))):
        say(f"{name}: its image processor orders the channels blue, green, red; training uses red, green, blue")
        gain, middle = gain[::-1], middle[:, ::-1]
    if made.shape[1] != 3 or not np.allclose(gain, np.diag(np.diag(gain))) or not np.diag(gain).all():
        raise UserError(f"{name}: its image processor does more than normalize each channel: use another model")
    std = 1 / np.diag(gain)
    mean = -middle[0] * std
    declared = tuple(processor.image_mean or ()), tuple(processor.image_std or ())
    if all(len(values) == 3 for values in declared) and np.allclose(declared, (mean, std), atol=1e-5):
        return declared
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def make_classifier(config: Any, names: tuple[str, ...]) -> nn.Module:
    """Return a classifier for the classes `names`: pretrained (`load_classifier`) or new (`new_classifier`)."""
    head = head_for(names, problem_type=None)  # a pretrained config may name another task
    if config.from_scratch or not config.model_name_or_path:
        return new_classifier(config, head)
    name, revision = config.model_name_or_path, config.revision
    model = load_classifier("AutoModelForImageClassification", name, revision=revision, **head)
    if config.image_size and (old := resize_positions(model, config.image_size)):
        say(f"--image_size {config.image_size}: the position embeddings of {name}, made for {old}, are interpolated")
    return model


@torch.no_grad()
def resize_positions(model: Any, size: int) -> str:
    """Interpolate the position embeddings of a model such as ViT, which takes images of one size, for another `size`.

    The result is stored in the model and its config, so the exported model takes images of `size`. Returns the old size
    in words; "" if there are no such embeddings, or if they have the size already.
    """
    old = ""
    for module in model.modules():
        patches: Any = getattr(module, "patch_embeddings", None)
        positions = getattr(module, "position_embeddings", None)
        if not hasattr(module, "interpolate_pos_encoding") or not isinstance(positions, nn.Parameter) or not patches:
            continue
        height, width = patches.image_size
        if (height, width) == (size, size):
            continue
        old = f"{height} x {width}"
        others = positions.shape[1] - patches.num_patches  # the positions of special tokens
        number = (size // patches.patch_size[0]) * (size // patches.patch_size[1])
        tokens = positions.new_empty(1, number + others, positions.shape[2])
        resized = module.interpolate_pos_encoding(tokens, size, size)
        module.position_embeddings = nn.Parameter(resized.contiguous(), requires_grad=positions.requires_grad)
        patches.image_size, patches.num_patches = (size, size), number
        module.image_size = (size, size)
        model.config.image_size = size
    return old


def new_classifier(config: Any, head: dict[str, Any]) -> nn.Module:
    """Return a classifier with random weights: the model of --model_name_or_path, or a ResNet with the config's sizes.

    Raises:
        UserError: the sizes do not fit each other.
    """
    from transformers import AutoModelForImageClassification, ResNetConfig

    if config.model_name_or_path:
        sizes = load_pretrained("AutoConfig", config.model_name_or_path, config.revision, **head)
        if config.image_size and hasattr(sizes, "image_size"):
            sizes.image_size = config.image_size
    else:
        if len(config.depths) != len(config.hidden_sizes):
            raise UserError("--depths and --hidden_sizes have different numbers of stages: give one number per stage")
        sizes = ResNetConfig(
            embedding_size=config.embedding_size,
            hidden_sizes=list(config.hidden_sizes),
            depths=list(config.depths),
            layer_type=config.layer_type,
            **head,
        )
    model = AutoModelForImageClassification.from_config(sizes)
    if config.zero_init_last_norm:  # each block starts as the identity (Goyal et al., section 5.1)
        for block in residual_blocks(model):
            nn.init.zeros_(list(block.layer)[-1].normalization.weight)
    return model


def residual_blocks(model: nn.Module) -> list[Any]:
    """The residual blocks of a ResNet of transformers, first to last. Their `layer` is beside the shortcut."""
    return [each for each in model.modules() if type(each).__name__ in ("ResNetBasicLayer", "ResNetBottleNeckLayer")]


def adapt_to_device(accelerator: Any, config: Any, model: Any, geometry: Geometry | None = None) -> nn.Module:
    """Apply the flags for a model's computation, such as --torch_compile, before the optimizer and `prepare`.

    The last layer is shortened if the head reads only one token. A pretrained model is first tested on images of the
    `geometry`.

    Raises:
        UserError: a pretrained model does not take such images, or does not return one logit per class; or see
            `check_loads`, `batch_norm.synchronize`, `use_activation_dtype` and `compile_layers`.
    """
    if geometry and config.model_name_or_path:
        name = f"--model_name_or_path {config.model_name_or_path}: a {type(model).__name__}"
        for size in {geometry.size, config.train_image_size or geometry.size}:
            with about(f"{name} cannot take images of {size} x {size}"), torch.no_grad(), in_eval_mode(model):
                logits = model(pixel_values=torch.zeros(2, 3, size, size)).logits
            if logits.shape != (2, len(model.config.id2label)):
                raise UserError(f"{name} returns {[*logits.shape[1:]]}, not one logit per class: use another model")
    check_loads(model)
    shorten_last_layer(model)
    if config.sync_batchnorm:
        model = synchronize(model)
    if config.channels_last and accelerator.device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    if config.cudnn_benchmark:  # at the first convolution of a shape, cuDNN times its algorithms
        torch.backends.cudnn.benchmark = True
    use_activation_dtype(config, model)
    use_fast_products(model)
    return compile_layers(config, model, fixed_shapes=True)


def freeze_backbone(model: Any) -> None:
    """Freeze everything below the head: no gradients, no optimizer state, no dropout, fixed batch norms.

    Raises:
        UserError: the model has no head apart from its backbone.
    """
    below = backbone(model)
    below.requires_grad_(False).eval()
    # model.train() would undo eval().
    below.train = MethodType(lambda module, mode=True: module, below)  # type: ignore[method-assign]
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze_backbone: a {type(model).__name__} has no classifier above its backbone")
