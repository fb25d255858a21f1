"""Image classifiers and their image processors: pretrained, or new ones of a transformers config."""

from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from shared.augmentation.geometry import Geometry
from shared.errors import UserError, say
from shared.models.batch_norm import synchronize
from shared.models.compiling import compile_layers
from shared.models.first_token import shorten_last_layer
from shared.models.loadable import check_names
from shared.pretrained.from_pretrained import backbone, head_for, load_classifier, load_pretrained, reason

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # as Pillow and image processors number them


def load_processor(config: Any) -> tuple[Any, Geometry]:
    """The image processor of an exported model, and what it does to an image, which is what the evaluation does.

    --image_size and --resize_size overrule what goes with --model_name_or_path.

    Raises:
        UserError: the image processor there cannot be loaded, or does what cannot be repeated here on the device.
    """
    from transformers import BitImageProcessorPil

    if config.model_name_or_path is None:
        size = config.image_size or 16
        geometry = Geometry(size, config.resize_size or size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    else:
        geometry = pretrained_geometry(config)
    crop = {"height": geometry.size, "width": geometry.size}
    processor = BitImageProcessorPil(
        size=crop if geometry.resize is None else {"shortest_edge": geometry.resize},
        do_center_crop=geometry.resize is not None,
        crop_size=crop,
        image_mean=list(geometry.mean),
        image_std=list(geometry.std),
        resample=RESAMPLE[geometry.interpolation],
    )
    return processor, geometry


def pretrained_geometry(config: Any) -> Geometry:
    """What is done to an image for --model_name_or_path: as its image processor says, or, without one, its config.

    Raises:
        UserError: neither says it, or see `geometry_of`.
    """
    name = f"--model_name_or_path {config.model_name_or_path}"
    try:
        given = load_pretrained("AutoImageProcessor", config.model_name_or_path, config.revision, backend="pil")
        return geometry_of(given, config)
    except UserError as error:
        if "Can't load image processor" not in str(error):  # as transformers says it of a missing file
            raise
    sizes = load_pretrained("AutoConfig", config.model_name_or_path, config.revision)
    known = getattr(getattr(sizes, "vision_config", sizes), "image_size", None)
    known = known[0] if isinstance(known, list | tuple) and len({*known}) == 1 else known
    size = config.image_size or known
    if not isinstance(size, int):
        raise UserError(f"{name} has no image processor, and its config no size of images: give --image_size")
    source = "--image_size" if config.image_size else "the model's config"
    say(f"{name} has no image processor: images of {size} x {size}, as {source} says, normalized as ImageNet's are")
    return Geometry(size, config.resize_size or size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")


def geometry_of(processor: Any, config: Any) -> Geometry:
    """What a pretrained image processor does.

    Raises:
        UserError: it has no size or no normalization that is understood here.
    """
    name = f"--model_name_or_path {config.model_name_or_path}"
    edges = dict(processor.size or {})
    crop = dict(getattr(processor, "crop_size", None) or {}) if getattr(processor, "do_center_crop", False) else {}
    share = getattr(processor, "crop_pct", None)
    side = edges.get("shortest_edge") or edges.get("height")
    if not side or edges.get("width", side) != side or crop.get("height") != crop.get("width"):
        raise UserError(f"{name}: its image processor makes no squares ({edges}, {crop}): use another model")
    resize: int | None
    if crop:
        size, resize = crop["height"], max(crop["height"], round(side / share) if share else side)
    elif "shortest_edge" in edges and share and side < 384:  # ConvNeXt's: beyond, it squeezes
        size, resize = side, round(side / share)
    else:
        size, resize = side, None
    if config.image_size:
        resize = resize and round(resize * config.image_size / size)
        size = config.image_size
    if resize:  # margins of whole pixels, as the exported processor cuts them
        resize = size + 2 * round((resize - size) / 2)
    interpolation = {number: name for name, number in RESAMPLE.items()}.get(int(processor.resample))
    if interpolation is None:
        interpolation = "bicubic"
        say(f"{name}: its image processor resamples in a way ({processor.resample}) that is not known here: bicubic is")
    return Geometry(size, config.resize_size or resize, *normalization_of(processor, name), interpolation)


def normalization_of(processor: Any, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of 0 ... 1, as an image processor applies them, whatever it says.

    EfficientNet's divides twice, others subtract one half first: so it is measured, on images of one color.

    Raises:
        UserError: what it makes are no images of three channels.
    """
    colors = np.concatenate([np.zeros((1, 3), np.uint8), 255 * np.eye(3, dtype=np.uint8)])
    images = [np.tile(color, (64, 64, 1)) for color in colors]
    try:
        made = np.stack([processor(images=image, return_tensors="np")["pixel_values"][0] for image in images])
        middle = made[:, :, made.shape[2] // 2, made.shape[3] // 2].astype(float)  # [4, 3]
    except Exception as error:  # some make tokens, or patches: whatever it raises, the choice of model is the cause
        raise UserError(f"{name}: its image processor makes no images ({reason(error)}): use another model") from None
    gain = middle[1:] - middle[0]
    if made.shape[1] == 3 and np.allclose(gain[::-1], np.diag(np.diag(gain[::-1]))):
        say(f"{name}: its image processor gives the channels as blue, green, red; here they are red, green, blue")
        gain, middle = gain[::-1], middle[:, ::-1]
    if made.shape[1] != 3 or not np.allclose(gain, np.diag(np.diag(gain))) or not np.diag(gain).all():
        raise UserError(f"{name}: its image processor does more than to normalize each channel: use another model")
    std = 1 / np.diag(gain)
    mean = -middle[0] * std
    said = tuple(processor.image_mean or ()), tuple(processor.image_std or ())
    if all(len(values) == 3 for values in said) and np.allclose(said, (mean, std), atol=1e-5):
        return said
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def make_classifier(config: Any, names: tuple[str, ...]) -> nn.Module:
    """A pretrained classifier with a head for the classes `names`, or a new one: see `load_classifier` and below."""
    head = head_for(names)
    if config.from_scratch or not config.model_name_or_path:
        return new_classifier(config, head)
    name, revision = config.model_name_or_path, config.revision
    return load_classifier("AutoModelForImageClassification", name, revision=revision, **head)


def new_classifier(config: Any, head: dict[str, Any]) -> nn.Module:
    """A model of new weights: that of --model_name_or_path --from_scratch, or a ResNet of the config's sizes.

    Raises:
        UserError: sizes that do not fit each other, or a new backbone that is to be frozen.
    """
    from transformers import AutoModelForImageClassification, ResNetConfig

    if config.freeze_backbone:
        raise UserError("--freeze_backbone with --from_scratch would never train the new backbone: leave out one")
    if config.model_name_or_path:
        sizes = load_pretrained("AutoConfig", config.model_name_or_path, config.revision, **head)
        if config.image_size and hasattr(sizes, "image_size"):
            sizes.image_size = config.image_size
    else:
        if len(config.depths) != len(config.hidden_sizes):
            raise UserError(
                f"--depths {' '.join(map(str, config.depths))} has {len(config.depths)} stages, --hidden_sizes "
                f"{len(config.hidden_sizes)}: give as many of each"
            )
        sizes = ResNetConfig(
            embedding_size=config.embedding_size,
            hidden_sizes=list(config.hidden_sizes),
            depths=list(config.depths),
            layer_type=config.layer_type,
            **head,
        )
    model = AutoModelForImageClassification.from_config(sizes)
    if config.zero_init_last_norm:
        zero_last_norms(model)
    return model


def zero_last_norms(model: nn.Module) -> None:
    """Start each residual block of a ResNet as the identity: zeros in its last norm (Goyal et al., section 5.1)."""
    for block in model.modules():
        if type(block).__name__ in ("ResNetBasicLayer", "ResNetBottleNeckLayer"):
            nn.init.zeros_(list(block.layer)[-1].normalization.weight)  # type: ignore[arg-type]


def adapt_to_device(accelerator: Any, config: Any, model: nn.Module, geometry: Geometry | None = None) -> nn.Module:
    """The model as --sync_batchnorm, --channels_last and --torch_compile ask for it; before optimizer and `prepare`.

    Nothing is computed that no head reads. A pretrained model is first tried on images of the `geometry`.

    Raises:
        UserError: see `check_names`, `require_logits`, `batch_norm.synchronize` and `compile_layers`.
    """
    if geometry and config.model_name_or_path:
        require_logits(model, geometry.size, f"--model_name_or_path {config.model_name_or_path}")
    check_names(model)
    shorten_last_layer(model)
    if config.sync_batchnorm:
        model = synchronize(accelerator, model)
    if config.channels_last and accelerator.device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return compile_layers(accelerator, config, model, fixed_shapes=True)


@torch.no_grad()
def require_logits(model: Any, size: int, name: str) -> None:
    """See that a model takes images of `size` pixels and gives one number for each class.

    Raises:
        UserError: it does not; `name` is the flag to name.
    """
    kind, was_training = type(model).__name__, model.training
    try:
        logits = model.eval()(pixel_values=torch.zeros(2, 3, size, size)).logits
    except Exception as error:  # of any model there is: the choice of model, or of the size, is the cause
        raise UserError(
            f"{name}: a {kind} cannot take images of {size} x {size} ({reason(error)}): use another --image_size, or "
            "another model"
        ) from None
    finally:
        model.train(was_training)
    if logits.shape != (2, len(model.config.id2label)):
        raise UserError(
            f"{name}: a {kind} gives no number for each class, but {[*logits.shape[1:]]}: use another model"
        )


def freeze_backbone(model: Any) -> None:
    """Train the head only: below it no gradient, and so no optimizer state, no dropout, no batch norm that moves.

    Raises:
        UserError: the model has no head beside its backbone.
    """
    below = backbone(model)
    below.requires_grad_(False).eval()
    below.train = MethodType(_stay, below)  # type: ignore[method-assign]  # model.train() would wake its batch norms
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"--freeze_backbone: a {type(model).__name__} has no classifier above its backbone: leave it out"
        )


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """A frozen module's `train`: it stays in eval mode."""
    return module
