"""Augmentation of whole batches on the device, in plain torch; the random numbers are functions of the sample.

Each random number is a hash of (seed, epoch, sample, number of the draw), computed on the CPU for a whole batch. It is
the same on any process and with any kind of device. Images are float32 [rows, 3, size, size].
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.augmentation.operations import LEVELS, USUAL, WIDE, change_at_random, crop_and_resize, enhance, hue, to
from shared.config.fields import Limits, Share
from shared.errors import say
from shared.images.decoding import Geometry
from shared.options.image_options import ImageOptions
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import Ints, hash64, permutation

MOST_OPERATIONS = 4  # largest --rand_augment
DRAWS = {
    name: number
    for number, name in enumerate(
        (
            *("area", "shape", "left", "top", "flip"),
            *("brightness", "contrast", "saturation", "operation", "magnitude", "sign"),
            *("erase", "erase area", "erase shape", "erase left", "erase top"),
            *("mix", "mix which", "mix left", "mix top", "hue"),
            *(f"{what} {i}" for i in range(MOST_OPERATIONS) for what in ("operation", "sign")),
        )
    )
}
STREAM = 3  # separates these draws from those of data sets (1) and dropout (2)
MAX_ASPECT = 4 / 3  # random crops have an aspect ratio from 3/4 to 4/3
ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), 3.3  # Zhong et al., "Random Erasing Data Augmentation"


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions(ImageOptions):
    """The flags for the size of the images and for their augmentation in training."""

    decode_size: int | None = None
    """Side of the square to which a training image is squeezed before its random crop. None: --resize_size."""
    image_size: int | None = None
    """Side of the model's input. None: the value of the pretrained model's image processor, or 16."""
    resize_size: int | None = None
    """Length of the shorter side before the evaluation's center crop. None: the image processor's, or --image_size."""
    train_image_size: int | None = None
    """Side of the crops in training, if smaller ones than in the evaluation are better (FixRes). None: --image_size."""
    min_crop_area: Annotated[float, Limits(above=0, most=1)] = 0.7
    """Smallest share of an image's area that a random crop takes. 1: the whole image."""
    horizontal_flip: bool = False
    """Mirror half of the training images left to right; unsuitable for digits."""
    color_jitter: Share = 0.0
    """Change brightness, contrast and saturation by a random factor, at most this far from 1."""
    hue: Annotated[float, Limits(least=0, most=0.5)] = 0.0
    """Shift the hue at random by up to this share of the color circle, at most 0.5."""
    trivial_augment: bool = False
    """TrivialAugment: one random operation of random strength on each training image."""
    rand_augment: Annotated[int, Limits(least=1, most=MOST_OPERATIONS)] | None = None
    """RandAugment: number of random operations on each training image, such as 2. None: none."""
    ra_magnitude: Annotated[int, Limits(least=1, most=LEVELS - 1)] | None = None
    """Strength of --rand_augment, at most 30. None: 9."""
    random_erasing: Share = 0.0
    """Share of the training images in which a random box is set to the mean color."""
    repeated_augmentation: int = 1
    """Copies of an image in a step, each time augmented in another way. A pass over the data takes that many epochs."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2. 0: no mixup. With --cutmix, each applies to half of the images."""
    cutmix: float = 0.0
    """Alpha of CutMix, such as 1. 0: no CutMix."""
    label_smoothing: Annotated[float, Limits(least=0, below=1)] = 0.0
    """Share of each target that is spread evenly over all classes."""

    NEEDS: ClassVar = (*ImageOptions.NEEDS, ("ra_magnitude", "rand_augment"))


@dataclass(kw_only=True, eq=False)
class RepeatingPlan(Plan):
    """A plan whose stream has each sample `repeats` times in succession, as if in as many epochs.

    Augmentation makes the copies differ (Hoffer et al. 2019, "Augment your batch"). A pass takes as many epochs.
    """

    repeats: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats > 1 and self.total_samples < self.repeats * self.num_samples:
            say(f"--repeated_augmentation {self.repeats}: some images are not used, a pass takes {self.repeats} epochs")

    def global_batch(self, step: int) -> tuple[Ints, Ints]:
        """As in `Plan`. The first copies of all samples come first, so that mixing mixes different images."""
        places = step * self.global_batch_size + np.arange(self.global_batch_size)
        passes, places = np.divmod(places[places < self.total_samples], self.repeats * self.num_samples)
        places, copies = np.divmod(places, self.repeats)
        samples = np.empty_like(places)
        for one in {*passes.tolist()}:
            mine = places[passes == one]
            order = permutation(self.seed, one * self.repeats, self.num_samples, int(mine[0]), int(mine[-1]) + 1)
            samples[passes == one] = order[mine - mine[0]]
        apart = copies.argsort(kind="stable")
        return samples[apart], (passes * self.repeats + copies)[apart]


def uniform(count: int, seed: int, micro_batch: MicroBatch, stream: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1), float64 [count, rows]; functions of the seed, the epoch, the sample and the stream."""
    rows = hash64(seed, micro_batch.epochs.astype(np.uint64), micro_batch.samples.astype(np.uint64), stream)
    return (hash64(np.arange(count, dtype=np.uint64)[:, None], state=rows) >> np.uint64(11)) / 2.0**53


class Draws:
    """Random numbers in [0, 1) for the rows of a micro-batch, by name; functions of seed, epoch and sample.

    All are made at once, because a call costs more than the numbers.
    """

    def __init__(self, seed: int, micro_batch: MicroBatch, device: torch.device) -> None:
        self.all, self.device = uniform(len(DRAWS), seed, micro_batch, STREAM), device  # float64 [draws, rows]

    def on_cpu(self, name: str) -> NDArray[np.float64]:
        """The draw `name` of each row, on the CPU: float64 [rows]."""
        return self.all[DRAWS[name]]

    def __call__(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        """The draw `name` of each row on the device, uniform in [low, high): float32 [rows]."""
        return self.uniform({name: (low, high)})[0]

    def uniform(self, ranges: dict[str, tuple[float, float]]) -> Tensor:
        """Draws by name, each uniform in its range, with one copy to the device: float32 [draws, rows]."""
        low, high = np.array([*ranges.values()]).T[..., None]
        return to(self.device, low + (high - low) * self.all[[DRAWS[name] for name in ranges]])


@dataclass(frozen=True)
class Augmentation:
    """The augmentation that a config requests, an `AugmentationOptions` with --channels_last."""

    config: Any
    geometry: Geometry

    def evaluation(self, batch: dict[str, Tensor]) -> Tensor:
        """Normalize the images, squares of the model's input size: float32 [rows, 3, size, size]."""
        images = batch["images"].permute(0, 3, 1, 2)
        return self.normalize(images.to(torch.float32, memory_format=torch.contiguous_format))

    def training(self, micro_batch: MicroBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Augmented, normalized images, float32 [rows, 3, side, side], and their shares; the same under autocast.

        The share, float32 [rows], is that of the row's own image, and the rest is that of the previous row's, as in
        `mixed_cross_entropy`. None: no images were mixed.

        The side is `train_image_size`, or that of the evaluation: Touvron et al. 2019, "Fixing the train-test
        resolution discrepancy".
        """
        config, draw = self.config, Draws(self.config.seed, micro_batch, batch["images"].device)
        with torch.autocast(draw.device.type, enabled=False):
            boxes = crop_boxes(draw, batch["aspects"], config.min_crop_area)
            if config.horizontal_flip:
                left, top, right, bottom = boxes.unbind(1)
                mirrored = torch.stack([right, top, left, bottom], dim=1)
                boxes = torch.where(draw("flip")[:, None] < 0.5, mirrored, boxes)
            size, interpolation = config.train_image_size or self.geometry.size, self.geometry.interpolation
            images = crop_and_resize(batch["images"], boxes, size, interpolation)
            if config.trivial_augment:
                operation, magnitude, sign = map(draw.on_cpu, ("operation", "magnitude", "sign"))
                images = change_at_random(images, operation, np.floor(magnitude * LEVELS), sign, WIDE)
            for i in range(config.rand_augment or 0):
                operation, sign = draw.on_cpu(f"operation {i}"), draw.on_cpu(f"sign {i}")
                images = change_at_random(images, operation, config.ra_magnitude or 9, sign, USUAL)
            for name in ("brightness", "contrast", "saturation") if config.color_jitter else ():
                factors = draw(name, max(0.0, 1 - config.color_jitter), 1 + config.color_jitter)[:, None, None, None]
                images = enhance(images, name, factors)
            if config.hue:
                images = hue(images, draw("hue", -config.hue, config.hue)[:, None, None, None])
            images = self.normalize(images)
            if config.random_erasing:
                images = images.masked_fill(erased(draw, images.shape[-1], config.random_erasing)[:, None], 0.0)
            if not (config.mixup or config.cutmix):
                return images, None
            return mix(images, draw, config.mixup, config.cutmix)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize values 0 ... 255 with the mean and the standard deviation that the model expects."""
        mean, std = (per_channel(values, images.device) for values in (self.geometry.mean, self.geometry.std))
        images = images.div_(255).sub_(mean).div_(std)  # in place: saves passes over memory
        last = images.is_cuda and self.config.channels_last
        return images.to(memory_format=torch.channels_last) if last else images


def crop_boxes(draw: Draws, aspects: Tensor, min_area: float) -> Tensor:
    """Boxes [rows, 4] of random crops, with `min_area` to 1 of the image's area and an aspect ratio of 3:4 to 4:3.

    This is Inception's crop (Szegedy et al., "Going Deeper with Convolutions") as torchvision defines it, with one draw
    per image instead of ten tries: a box wider or higher than the image is cut to the image. If `min_area` is 1, the
    result is one box [1, 4] of the whole image, whatever its shape.
    """
    if min_area >= 1:
        return per_channel((0.0, 0.0, 1.0, 1.0), aspects.device).view(1, 4)
    widest = math.log(MAX_ASPECT)
    ranges = {"area": (min_area, 1.0), "shape": (-widest, widest), "left": (0.0, 1.0), "top": (0.0, 1.0)}
    area, shape, left, top = draw.uniform(ranges)
    shape = shape.exp()  # width over height, in pixels
    wide = (area * shape).div_(aspects).sqrt_().clamp_(max=1)
    high = (area / shape).mul_(aspects).sqrt_().clamp_(max=1)
    left, top = left * (1 - wide), top * (1 - high)
    return torch.stack([left, top, left + wide, top + high], dim=1)


@cache
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 [values, 1, 1], cached because each copy to a GPU would synchronize."""
    return torch.tensor(values, device=device)[:, None, None]


def erased(draw: Draws, size: int, probability: float) -> Tensor:
    """The pixels that random erasing replaces, bool [rows, size, size]: a box in `probability` of the images."""
    area = draw("erase area", *ERASED_AREA) * size * size
    shape = draw("erase shape", -math.log(ERASED_ASPECT), math.log(ERASED_ASPECT)).exp()
    wide = (area * shape).sqrt().round().clamp(max=size)
    high = (area / shape).sqrt().round().clamp(max=size)
    left, top = (draw("erase left") * (size - wide + 1)).floor(), (draw("erase top") * (size - high + 1)).floor()
    return inside(left, top, left + wide, top + high, size) & (draw("erase") < probability)[:, None, None]


def inside(left: Tensor, top: Tensor, right: Tensor, bottom: Tensor, size: int) -> Tensor:
    """Masks, bool [rows, size, size], of boxes whose edges are whole pixels [rows]."""
    places = torch.arange(size, device=left.device)
    columns = (places >= left[:, None]) & (places < right[:, None])
    lines = (places >= top[:, None]) & (places < bottom[:, None])
    return lines[:, :, None] & columns[:, None, :]


def mix(images: Tensor, draw: Draws, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mix each image of the micro-batch with the previous one; return the images and each image's own share, [rows].

    Mixup (Zhang et al. 2018) blends the two images, CutMix (Yun et al. 2019) pastes a box of the other image. `mixup`
    and `cutmix` are the alphas of the Beta distributions of the image's own share; 0 turns the method off. With both,
    each image gets one of them with probability 1/2.
    """
    from scipy.special import betaincinv

    size = images.shape[-1]
    pasted = draw.on_cpu("mix which") < 0.5 if mixup and cutmix else np.full(len(images), bool(cutmix))
    alpha = np.where(pasted, cutmix, mixup)
    kept = betaincinv(alpha, alpha, draw.on_cpu("mix"))
    half = np.sqrt(1 - kept) * size / 2
    x, y = draw.on_cpu("mix left") * size, draw.on_cpu("mix top") * size
    edges = np.clip([x - half, y - half, x + half, y + half], 0, size).round()  # left, top, right, bottom
    area = (edges[2] - edges[0]) * (edges[3] - edges[1]) / size**2
    kept = np.where(pasted, 1 - area, kept)  # the share that the clipped box leaves

    left, top, right, bottom = to(images.device, edges)
    box = inside(left, top, right, bottom, size)
    blended = to(images.device, np.where(pasted, 1.0, kept))[:, None, None, None]
    cut = to(images.device, pasted.astype(float))[:, None, None] > 0
    other = images.roll(1, 0)
    images = torch.where((box & cut)[:, None], other, blended * images + (1 - blended) * other)
    return images, to(images.device, kept)


def mixed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    share: Tensor | None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    binary: bool = False,
) -> Tensor:
    """Cross entropy of each row with its target, [rows].

    Args:
        logits: [rows, classes].
        labels: int64 [rows], the class of each row's own image.
        share: [rows], the weight of that class; the rest is the weight of the previous row's. None: 1 each.
        label_smoothing: share of each target that is spread evenly over all classes.
        weight: [classes], of the logarithm of each class's probability; None: 1 each.
        binary: the sum of the binary cross entropies of all classes, with the same probabilities as targets
            (Wightman et al. 2021, "ResNet strikes back"). It takes no `weight`.
    """
    classes, targets = logits.shape[1], labels
    if binary or share is not None:  # `F.one_hot` reads its largest number, for which the host would wait
        targets = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, labels[:, None], 1.0)
    if share is not None:
        targets = targets.roll(1, 0).lerp(targets, share[:, None])
    if binary:
        smooth = (1 - label_smoothing) * targets + label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").sum(-1)
    return F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=label_smoothing)
