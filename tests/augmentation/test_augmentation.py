"""Each transform equals Pillow's or a formula; random numbers depend only on the seed, the epoch and the sample."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from shared.augmentation import operations
from shared.augmentation.augmentation import DRAWS, Augmentation, AugmentationOptions, Draws, crop_boxes, erased, mix
from shared.images.decoding import Geometry
from shared.plan.batches import MicroBatch

CPU = torch.device("cpu")
GEOMETRY = Geometry(size=12, resize=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), interpolation="bilinear")


def photo(side, seed=0):
    """A smooth Pillow image with edges."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (7, 7, 3), np.uint8)).resize((side, side), Image.Resampling.BICUBIC)


def stored(*images):
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def batch(*images):
    """float32 [rows, 3, height, width]."""
    return stored(*images).permute(0, 3, 1, 2).float()


def arrays(images):
    return images.permute(0, 2, 3, 1).numpy()


def augmentation(geometry=GEOMETRY, **changed):
    return Augmentation(AugmentationOptions(**{"min_crop_area": 1.0} | changed), geometry)


def micro_batch(samples, epochs=None):
    samples = np.asarray(samples)
    epochs = np.zeros_like(samples) if epochs is None else np.asarray(epochs)
    return MicroBatch(0, 0, samples, epochs, len(samples))


# Crops


@pytest.mark.parametrize(
    ("name", "pillow"), [("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)]
)
@pytest.mark.parametrize(("side", "size"), [(64, 24), (24, 64), (33, 32), (8, 32)])
def test_crop_and_resize_equals_pillows(name, pillow, side, size):
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.1, 0.2, 0.8, 0.95], [0.9, 0.3, 0.4, 0.6]])
    images = [photo(side, seed) for seed in range(3)]
    found = arrays(operations.crop_and_resize(stored(*images), boxes, size, name))
    for image, box, cut in zip(images, boxes, found, strict=True):
        left, top, right, bottom = (box.double() * side).tolist()
        expected = np.asarray(image.resize((size, size), pillow, box=(min(left, right), top, max(left, right), bottom)))
        expected = expected[:, ::-1] if left > right else expected
        assert np.abs(cut - expected).max() <= 2  # Pillow computes with integers
        assert np.abs(cut - expected).mean() < 0.3


@given(st.integers(0, 2**31), st.floats(0.08, 0.99), st.floats(0.3, 3))
@settings(max_examples=30, deadline=None)
def test_random_crops_lie_in_the_image_and_have_the_requested_area_and_shape(seed, area, aspect):
    draw = Draws(seed, micro_batch(range(64)), CPU)
    left, top, right, bottom = crop_boxes(draw, torch.full((64,), aspect), area).unbind(1)
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= 1 + 1e-6
    wide, high = right - left, bottom - top
    whole = (wide < 0.999) & (high < 0.999)
    shapes = (wide / high * aspect)[whole]
    assert ((wide * high)[whole] >= area - 1e-5).all()
    assert ((shapes > 3 / 4 - 1e-4) & (shapes < 4 / 3 + 1e-4)).all()


# Colors and TrivialAugment


def test_operations_on_values_equal_those_of_pillow():
    images = [photo(20), photo(20, 1).point(lambda v: 60 + v // 3), Image.new("RGB", (20, 20), (10, 200, 30))]
    given, each = batch(*images), lambda value: torch.full((3, 1, 1, 1), value)
    cases = [
        (operations.posterize(given, each(3.0)), lambda image: ImageOps.posterize(image, 3)),
        (operations.solarize(given, each(100.0)), lambda image: ImageOps.solarize(image, 100)),
        (operations.autocontrast(given), ImageOps.autocontrast),
        (operations.equalize(given), ImageOps.equalize),
    ]
    for name in ("brightness", "contrast", "saturation", "sharpness"):
        pillow = getattr(ImageEnhance, {"saturation": "Color"}.get(name, name.title()))
        for factor in (0.0, 0.3, 1.0, 1.7):
            enhanced = operations.enhance(given, name, each(factor))
            cases.append((enhanced, lambda image, p=pillow, f=factor: p(image).enhance(f)))
    for found, pillow in cases:
        for image, changed in zip(images, arrays(found), strict=True):
            assert np.abs(changed - np.asarray(pillow(image))).max() <= 1


@pytest.mark.parametrize("shift", [-0.5, -0.17, 0.0, 0.33])
def test_hue_shifts_equal_those_of_colorsys(shift):
    images = [photo(20), photo(20, 1), Image.new("RGB", (20, 20), (90, 90, 90))]
    found = arrays(operations.hue(batch(*images), torch.full((3, 1, 1, 1), shift)))
    for image, turned in zip(images, found, strict=True):
        pixels = np.asarray(image).reshape(-1, 3) / 255
        hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in pixels]
        exact = np.array([colorsys.hsv_to_rgb((h + shift) % 1, s, v) for h, s, v in hsv]) * 255
        assert np.abs(turned.reshape(-1, 3) - exact).max() <= 0.51


@pytest.mark.parametrize("space", [operations.WIDE, operations.USUAL], ids=["trivial", "rand"])
@pytest.mark.parametrize("name", operations.GEOMETRY)
@pytest.mark.parametrize("strength", [-0.9, 0.37])
def test_shears_shifts_and_rotations_equal_those_of_pillow(name, strength, space):
    image, signed = photo(40), np.array([strength])
    if name == "rotate":
        expected = image.rotate(strength * space.turn)
    else:
        matrix = operations.inverse(name, signed, 40, space)[0]
        expected = image.transform((40, 40), Image.Transform.AFFINE, tuple(matrix.ravel()))
    found = arrays(operations.change(batch(image), name, abs(signed), signed, space))[0]
    assert (found != np.asarray(expected)).mean() < 0.01  # a position between two pixels may be rounded differently


def test_the_magnitude_sets_the_strength_of_an_operation_of_randaugment():
    """Magnitude 10 of 30 is a third of the way to the strongest that torchvision has."""
    image = photo(60)
    names = operations.OPERATIONS
    shift = Image.Transform.AFFINE, (1, 0, 150 / 331 * 60 / 3, 0, 1, 0)
    shear = Image.Transform.AFFINE, (1, 0.1, 0, 0, 1, 0)
    for name, expected in (
        ("identity", image),
        ("rotate", image.rotate(10)),
        ("shear x", image.transform((60, 60), *shear)),
        ("translate x", image.transform((60, 60), *shift)),
        ("brightness", ImageEnhance.Brightness(image).enhance(1.3)),
        ("sharpness", ImageEnhance.Sharpness(image).enhance(1.3)),
        ("posterize", ImageOps.posterize(image, 7)),
        ("solarize", ImageOps.solarize(image, 170)),
    ):
        drawn = np.array([(names.index(name) + 0.5) / len(names)])
        changed = arrays(operations.change_at_random(batch(image), drawn, 10, np.array([0.2]), operations.USUAL))[0]
        assert (np.abs(changed - np.asarray(expected)) > 1).mean() < 0.01, name


# Erasing and mixing


def test_random_erasing_blanks_one_box_of_a_share_of_the_images():
    masks = erased(Draws(0, micro_batch(range(2000)), CPU), 32, 0.25)
    hit = masks.flatten(1).any(1)
    assert 0.2 < hit.float().mean() < 0.3
    for mask in masks[hit][:50]:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        height, width = len(rows), len(columns)
        assert mask.sum() == height * width
        assert rows[-1] - rows[0] + 1 == height
        assert columns[-1] - columns[0] + 1 == width
        assert 0.01 < height * width / 32**2 < 0.4
    assert not erased(Draws(0, micro_batch(range(100)), CPU), 32, 0.0).any()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_an_image_has_the_share_that_is_returned(mixup, cutmix):
    """All pixels of image i are i and those of its partner i - 1, so the mean of the pixels gives the share."""
    images = torch.arange(400.0)[:, None, None, None].expand(400, 3, 16, 16)
    images, shares = mix(images, Draws(0, micro_batch(range(400)), CPU), mixup, cutmix)
    assert torch.allclose(images[1:].mean((1, 2, 3)), torch.arange(1, 400) - (1 - shares[1:]), atol=1e-3)
    assert torch.allclose(images[0].mean(), (1 - shares[0]) * 399, atol=1e-3)
    pasted = torch.tensor([len(image.unique()) > 1 for image in images[1:]])
    expected = {(0.4, 0.0): 0.0, (0.0, 1.0): 0.97, (0.4, 1.0): 0.48}[mixup, cutmix]
    assert pasted.float().mean().item() == pytest.approx(expected, abs=0.06)


def test_each_image_is_mixed_with_the_previous_one_of_its_micro_batch():
    images = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 20, 20, 3) * 30
    batch = {"images": images, "aspects": torch.ones(8), "labels": torch.arange(8)}
    as_stored = Geometry(size=20, resize=20, mean=(0.0,) * 3, std=(1 / 255,) * 3, interpolation="bilinear")
    found, share = augmentation(as_stored, mixup=1.0).training(micro_batch(range(8)), batch)
    expected = share * torch.arange(8) * 30 + (1 - share) * torch.arange(-1, 7).remainder(8) * 30
    assert torch.allclose(found.mean((1, 2, 3)), expected, atol=1e-2)
    assert share.std() > 0.05
    unmixed, share = augmentation(as_stored).training(micro_batch(range(8)), batch)
    assert torch.allclose(unmixed.mean((1, 2, 3)), torch.arange(8) * 30.0, atol=1e-2)
    assert share is None


# Draws


def test_draws_depend_on_seed_epoch_and_sample_and_not_on_the_batch():
    whole = Draws(3, micro_batch(range(50), [7] * 50), CPU)
    part = Draws(3, micro_batch([40, 2, 11], [7] * 3), CPU)
    for name in DRAWS:
        assert np.array_equal(whole.on_cpu(name)[[40, 2, 11]], part.on_cpu(name))
    golden = [0.3614932133401947, 0.17991185039053526]  # a resumed run relies on it
    assert Draws(0, micro_batch([0, 1]), CPU).on_cpu("area").tolist() == golden


def test_draws_are_uniform_and_uncorrelated():
    drawn = {name: Draws(0, micro_batch(range(4000)), CPU).on_cpu(name) for name in DRAWS}
    drawn |= {"epoch 1": Draws(0, micro_batch(range(4000), [1] * 4000), CPU).on_cpu("area")}
    drawn |= {"seed 1": Draws(1, micro_batch(range(4000)), CPU).on_cpu("area")}
    values = np.stack(list(drawn.values()))
    assert values.min() >= 0
    assert values.max() < 1
    assert np.abs(values.mean(1) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(values) - np.eye(len(values))).max() < 0.08


def test_an_augmented_image_does_not_depend_on_its_micro_batch_or_on_autocast():
    settings = {"min_crop_area": 0.3, "horizontal_flip": True, "trivial_augment": True, "rand_augment": 2}
    every = augmentation(color_jitter=0.4, hue=0.1, random_erasing=0.5, **settings)
    images, aspects = stored(*(photo(20, seed) for seed in range(6))), torch.linspace(0.5, 2, 6)

    def augment(rows):
        rows = torch.tensor([*rows])
        batch = {"images": images[rows], "aspects": aspects[rows], "labels": rows}
        return every.training(micro_batch(rows), batch)[0]

    together, evaluated = augment(range(6)), every.evaluation({"images": images})
    assert together.shape == (6, 3, 12, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which changes nothing
        assert every.evaluation({"images": images}).equal(evaluated)
        assert augment(range(6)).equal(together)
    apart = torch.cat([augment([3, 1]), augment([0])])
    assert torch.allclose(together[[3, 1, 0]], apart, atol=1e-5)


def test_training_and_evaluation_can_have_other_sizes():
    how = augmentation(train_image_size=8, random_erasing=1.0, cutmix=1.0)
    images = {"images": stored(photo(20), photo(20, 1)), "aspects": torch.ones(2), "labels": torch.arange(2)}
    assert how.training(micro_batch([0, 1]), images)[0].shape == (2, 3, 8, 8)
    plain = augmentation(train_image_size=8).training(micro_batch([0, 1]), images)[0]
    smaller = augmentation(replace(GEOMETRY, size=8)).training(micro_batch([0, 1]), images)[0]
    assert torch.equal(plain, smaller)
    assert how.evaluation({"images": stored(photo(12))}).shape == (1, 3, 12, 12)
