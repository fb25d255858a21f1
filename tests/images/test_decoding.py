"""Images of every format and mode are decoded correctly."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms
from small_images import encoded, quarters

from shared.augmentation.augmentation import Augmentation, AugmentationOptions
from shared.images.decoding import CorruptImage, Geometry, Square, decode, inspect
from shared.images.image_models import geometry_of, image_processor, load_geometry
from shared.images.images import collate


def stored_images():
    """{mode and file format: bytes}, images of 16 x 16 in every mode that a file can have."""
    rng = np.random.default_rng(0)
    color = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
    deep = rng.integers(0, 400, (16, 16))
    transparent = color.copy()
    transparent.putalpha(Image.fromarray(rng.integers(0, 256, (16, 16), np.uint8)))
    palette = color.quantize(16)
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    saved = {
        "1": (color.convert("1"), "PNG", {}),
        "L": (color.convert("L"), "PNG", {}),
        "LA": (transparent.convert("LA"), "PNG", {}),
        "P": (palette, "PNG", {}),
        "P, one color transparent": (palette, "PNG", {"transparency": 3}),
        "P, each color its own": (palette, "PNG", {"transparency": bytes(range(0, 160, 10))}),
        "P GIF": (palette, "GIF", {"transparency": 3}),
        "GIF of two": (palette, "GIF", {"save_all": True, "append_images": [palette.rotate(90)]}),
        "RGB": (color, "PNG", {}),
        "RGB, one color transparent": (color, "PNG", {"transparency": color.getpixel((0, 0))}),
        "RGBA": (transparent, "PNG", {}),
        "WebP of two": (color, "WEBP", {"save_all": True, "append_images": [color.rotate(90)], "lossless": True}),
        "CMYK": (color.convert("CMYK"), "TIFF", {}),
        "CMYK JPEG": (color.convert("CMYK"), "JPEG", {"quality": 100}),
        "YCbCr": (color.convert("YCbCr"), "TIFF", {}),
        "LAB": (ImageCms.profileToProfile(color, *profiles, outputMode="LAB"), "TIFF", {}),
        "I": (Image.fromarray(deep.astype(np.int32)), "TIFF", {}),
        "F": (Image.fromarray(deep.astype(np.float32)), "TIFF", {}),
        "I;16": (Image.fromarray(deep.astype(np.uint16)), "PNG", {}),
    }
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        saved[f"rotated {orientation}"] = (color, "PNG", {"exif": exif.tobytes()})
    return {name: encoded(image, kind, **options) for name, (image, kind, options) in saved.items()}


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize(("mode", "stored"), [pytest.param(*item, id=item[0]) for item in stored_images().items()])
def test_every_mode_is_decoded_as_in_a_pipeline(mode, stored, tmp_path):
    """The evaluation's tensor equals that of transformers' load_image and the exported image processor."""
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    config = SimpleNamespace(model_name_or_path=None, image_size=16, resize_size=None)
    geometry = load_geometry(config)
    image_processor(geometry).save_pretrained(tmp_path)
    (tmp_path / "image").write_bytes(stored)
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = loaded(images=load_image(str(tmp_path / "image")), return_tensors="pt")["pixel_values"]
    pixels, aspect = decode(stored, geometry.evaluation_square)
    found = Augmentation(AugmentationOptions(), geometry).evaluation(collate([(pixels, aspect, 0)]))
    assert torch.allclose(found, expected, atol=1e-5), mode


@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    sides=st.tuples(st.integers(1, 40), st.integers(0, 30)),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    squeezed=st.booleans(),
)
@example(width=64, height=65, sides=(64, 8), interpolation="bilinear", squeezed=False)
@example(width=1, height=3000, sides=(8, 2), interpolation="bilinear", squeezed=False)
@example(width=400, height=300, sides=(32, 5), interpolation="bilinear", squeezed=False)
@settings(max_examples=60, deadline=None)
def test_images_of_any_size_are_evaluated_as_by_the_exported_image_processor(
    width, height, sides, interpolation, squeezed
):
    """Also below and above --decode_size, with an odd margin; the exported processor has the same geometry."""
    size, margin = sides
    geometry = Geometry(size, None if squeezed else size + margin, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), interpolation)
    processor, flags = image_processor(geometry), {"image_size": None, "resize_size": None}
    assert geometry_of(processor, SimpleNamespace(model_name_or_path="", **flags)) == geometry
    image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    for kind in ("PNG", "JPEG"):
        stored = encoded(image, kind)
        image = Image.open(io.BytesIO(stored))
        expected = processor(images=image, return_tensors="pt")["pixel_values"]
        item = (*decode(stored, geometry.evaluation_square), 0)
        found = Augmentation(AugmentationOptions(), geometry).evaluation(collate([item]))
        assert torch.allclose(found, expected, atol=1e-5, rtol=0)


def test_large_photographs_are_decoded_small_and_look_the_same():
    large = quarters(800, 600)
    pixels, aspect = decode(encoded(large, "JPEG", quality=95), Square(64))
    expected = np.asarray(large.resize((64, 64), Image.Resampling.BILINEAR), int)
    assert aspect == pytest.approx(4 / 3)
    assert np.abs(pixels - expected).mean() < 3


@pytest.mark.parametrize("broken", [b"", b"no image", encoded(quarters())[:100], encoded(quarters(), "JPEG")[:-200]])
def test_files_that_are_not_images_or_are_cut_off_are_corrupt(broken, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(broken)
    for stored in (broken, tmp_path / "broken.jpg"):
        with pytest.raises(CorruptImage):
            decode(stored, Square(32))


def test_images_that_are_too_large_for_pillow_are_corrupt(monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(CorruptImage, match="exceeds limit of 1000 pixels"):
        decode(encoded(quarters()), Square(8))
    assert "exceeds limit of 1000 pixels" in inspect(encoded(quarters()))[2]
