"""Image classifiers and their image processors: pretrained, or new ones of a transformers config."""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from shared.batch_norm import synchronize
from shared.compiling import compile_layers
from shared.errors import UserError
from shared.first_token import shorten_last_layer
from shared.pretrained import load_pretrained

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # as Pillow and image processors number them


@dataclass(frozen=True)
class Geometry:
    """What a model's images are: how the evaluation cuts them, and what an exported processor does."""

    size: int  # of the model's input
    resize: int | None  # the shorter side is scaled to it before the middle is cut out; None: all is squeezed to `size`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @property
    def center_share(self) -> float | None:
        """Share of the shorter side that the evaluation sees."""
        return None if self.resize is None else self.size / self.resize


def load_processor(config: Any) -> tuple[Any, Geometry]:
    """The image processor that goes with --model_name_or_path, or a new one; and what it does to an image.

    --image_size and --resize_size overrule a pretrained one.

    Raises:
        UserError: it cannot be loaded, or does what cannot be repeated here on the device.
    """
    from transformers import BitImageProcessorPil

    if config.model_name_or_path is None:
        size = config.image_size or 16
        geometry = Geometry(size, config.resize_size or size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    else:
        given = load_pretrained("AutoImageProcessor", config.model_name_or_path, config.revision, backend="pil")
        geometry = geometry_of(given, config)
        if geometry.resize is None:
            given.size = {"height": geometry.size, "width": geometry.size}
            return given, geometry
    processor = BitImageProcessorPil(
        size={"shortest_edge": geometry.resize},  # type: ignore[dict-item]  # a number: a new model always has one
        crop_size={"height": geometry.size, "width": geometry.size},
        image_mean=list(geometry.mean),
        image_std=list(geometry.std),
        resample=RESAMPLE[geometry.interpolation],
    )
    return processor, geometry


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
        size, resize = crop["height"], side
    elif "shortest_edge" in edges and share and side < 384:  # ConvNeXt's: beyond, it squeezes
        size, resize = side, round(side / share)
    else:
        size, resize = side, None
    if config.image_size:
        resize = resize and round(resize * config.image_size / size)
        size = config.image_size
    interpolation = {number: name for name, number in RESAMPLE.items()}.get(int(processor.resample))
    if interpolation is None:
        raise UserError(f"{name}: its image processor resamples in a way ({processor.resample}) that is not known here")
    normalize = processor.do_normalize
    mean = tuple(processor.image_mean) if normalize else (0.0, 0.0, 0.0)
    std = tuple(processor.image_std) if normalize else (1.0, 1.0, 1.0)
    return Geometry(size, config.resize_size or resize, mean, std, interpolation)


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


def for_device(accelerator: Any, config: Any, model: nn.Module) -> nn.Module:
    """The model as --sync_batchnorm, --channels_last and --torch_compile ask for it; before optimizer and `prepare`.

    Nothing is computed that no head reads.

    Raises:
        UserError: see `batch_norm.synchronize` and `compile_layers`.
    """
    shorten_last_layer(model)
    if config.sync_batchnorm:
        model = synchronize(accelerator, model)
    if config.channels_last and accelerator.device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return compile_layers(accelerator, config, model)


def freeze_backbone(model: Any) -> None:
    """Train the head only: below it no gradient, and so no optimizer state, no dropout, no batch norm that moves."""
    backbone = model.base_model
    backbone.requires_grad_(False).eval()
    backbone.train = MethodType(_stay, backbone)  # model.train(), which a loop calls, would wake its batch norms


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """A frozen module's `train`: it stays in eval mode."""
    return module
