"""Images of every kind come out right; what cannot be read is named, or left out before the run."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from shared.augmentation.augmentation import Augmentation
from shared.errors import UserError
from shared.images import cache as image_cache
from shared.images import checks
from shared.images.checks import key_of_column
from shared.images.decoding import CorruptImage, decode, inspect
from shared.images.images import collate, load_images, prepare, worst_predictions
from shared.images.sources import class_folders, digits, hold_out, load_sources
from shared.models.image_models import load_processor
from shared.plan.splits import by_class

RED, GREEN, BLUE, GREY = (250, 10, 20), (10, 240, 30), (20, 30, 230), (128, 128, 128)


def quarters(width=40, height=40):
    """Red, green, blue and grey quarters."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, GREY
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def corners(pixels):
    """The colors inside the four quarters, in reading order."""
    near, far = len(pixels) // 4, 3 * len(pixels) // 4
    return [tuple(map(int, pixels[y, x])) for y in (near, far) for x in (near, far)]


def close(found, expected, within=6):
    return np.abs(np.array(found, int) - np.array(expected, int)).max() <= within


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))


def config(**changed):
    plain = {"train_dir": None, "validation_dir": None, "train_file": None, "validation_file": None}
    plain |= {"dataset_name": None, "dataset_config_name": None, "image_column_name": "image"}
    plain |= {"label_column_name": "label", "validation_split_percentage": 20, "seed": 0, "cache": "none"}
    plain |= {"skip_corrupt_images": False, "model_name_or_path": None, "from_scratch": False}
    plain |= {"csv_delimiter": None, "train_split_name": None, "validation_split_name": None}
    plain |= {"skip_incomplete_rows": False, "max_train_samples": None, "max_eval_samples": None}
    return SimpleNamespace(**(plain | changed))


# Decoding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_colors_of_common_formats_come_out(kind):
    pixels, aspect = decode(encoded(quarters(60, 40), kind), 32)
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8
    assert aspect == 1.5
    assert close(corners(pixels), [RED, GREEN, BLUE, GREY], 12)


def test_palette_grey_cmyk_and_two_colors_come_out():
    assert close(corners(decode(encoded(quarters().quantize(8)), 32)[0]), [RED, GREEN, BLUE, GREY], 12)
    luminance = [(v, v, v) for v in (83, 147, 50, 128)]
    assert close(corners(decode(encoded(quarters().convert("L")), 32)[0]), luminance)
    assert close(corners(decode(encoded(quarters().convert("CMYK"), "JPEG"), 32)[0]), [RED, GREEN, BLUE, GREY], 14)
    bits = Image.new("1", (40, 40), 1)
    assert corners(decode(encoded(bits), 32)[0]) == [(255, 255, 255)] * 4


def test_transparent_pixels_have_the_color_that_is_stored_there_as_in_a_pipeline():
    image = quarters().convert("RGBA")
    image.paste((255, 0, 255, 0), (0, 0, 20, 20))
    assert close(corners(decode(encoded(image), 32)[0]), [(255, 0, 255), GREEN, BLUE, GREY])
    half = Image.new("LA", (40, 40), (0, 128))
    assert close(corners(decode(encoded(half), 32)[0]), [(0, 0, 0)] * 4)


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
        "L JPEG": (color.convert("L"), "JPEG", {"quality": 100}),
        "LA": (transparent.convert("LA"), "PNG", {}),
        "P": (palette, "PNG", {}),
        "P, one color transparent": (palette, "PNG", {"transparency": 3}),
        "P, each color its own": (palette, "PNG", {"transparency": bytes(range(0, 160, 10))}),
        "P GIF": (palette, "GIF", {"transparency": 3}),
        "GIF of two": (palette, "GIF", {"save_all": True, "append_images": [palette.rotate(90)]}),
        "RGB": (color, "PNG", {}),
        "RGB, one color transparent": (color, "PNG", {"transparency": color.getpixel((0, 0))}),
        "RGBA": (transparent, "PNG", {}),
        "RGBA WebP": (transparent, "WEBP", {"lossless": True}),
        "WebP of two": (color, "WEBP", {"save_all": True, "append_images": [color.rotate(90)], "lossless": True}),
        "TIFF of two": (color, "TIFF", {"save_all": True, "append_images": [color.rotate(90)]}),
        "CMYK": (color.convert("CMYK"), "TIFF", {}),
        "CMYK JPEG": (color.convert("CMYK"), "JPEG", {"quality": 100}),
        "YCbCr": (color.convert("YCbCr"), "TIFF", {}),
        "LAB": (ImageCms.profileToProfile(color, *profiles, outputMode="LAB"), "TIFF", {}),
        "I": (Image.fromarray(deep.astype(np.int32)), "TIFF", {}),
        "F": (Image.fromarray(deep.astype(np.float32)), "TIFF", {}),
        "I;16": (Image.fromarray(deep.astype(np.uint16)), "PNG", {}),
        "I;16 TIFF": (Image.fromarray(deep.astype(np.uint16)), "TIFF", {}),
    }
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        saved[f"rotated {orientation}"] = (color, "PNG", {"exif": exif.tobytes()})
    return {name: encoded(image, kind, **options) for name, (image, kind, options) in saved.items()}


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize(("mode", "stored"), [pytest.param(*item, id=item[0]) for item in stored_images().items()])
def test_every_mode_is_evaluated_as_a_pipeline_loads_it(mode, stored, tmp_path):
    """The tensor of transformers' load_image and the exported image processor, against that of the evaluation."""
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    config = SimpleNamespace(model_name_or_path=None, image_size=16, resize_size=None)
    processor, geometry = load_processor(config)
    processor.save_pretrained(tmp_path)
    (tmp_path / "image").write_bytes(stored)
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = loaded(images=load_image(str(tmp_path / "image")), return_tensors="pt")["pixel_values"]
    pixels, aspect = decode(stored, 16)
    found = Augmentation(seed=0, geometry=geometry).evaluation(collate([(pixels, aspect, 0)]))
    assert torch.allclose(found, expected, atol=1e-5), mode


@pytest.mark.parametrize("mode", ["La", "RGBa", "RGBX", "PA", "HSV", "I;16B"])
def test_modes_that_no_file_has_are_converted_as_load_image_does_or_refused_with_it(mode, monkeypatch):
    from transformers.image_utils import load_image

    image = Image.new(mode, (16, 16))
    monkeypatch.setattr(Image, "open", lambda _: image)
    try:
        expected = np.asarray(load_image(image))
    except ValueError:
        with pytest.raises(CorruptImage, match="not supported"):
            decode(b"", 16)
    else:
        assert np.array_equal(decode(b"", 16)[0], expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_photographs_are_upright(orientation):
    upright = quarters(60, 40)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that the orientation takes back
    image = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels, aspect = decode(encoded(image, "JPEG", quality=95, exif=exif), 32)
    assert aspect == 1.5
    assert close(corners(pixels), [RED, GREEN, BLUE, GREY], 12)


def test_large_photographs_are_decoded_small_and_look_the_same():
    large = quarters(800, 600)
    pixels, aspect = decode(encoded(large, "JPEG", quality=95), 64)
    expected = np.asarray(large.resize((64, 64), Image.Resampling.BILINEAR), int)
    assert aspect == pytest.approx(4 / 3)
    assert np.abs(pixels - expected).mean() < 3


@pytest.mark.parametrize("broken", [b"", b"no image", encoded(quarters())[:100], encoded(quarters(), "JPEG")[:-200]])
def test_what_is_no_image_or_cut_off_is_corrupt(broken, tmp_path):
    with pytest.raises(CorruptImage):
        decode(broken, 32)
    file = tmp_path / "broken.jpg"
    file.write_bytes(broken)
    with pytest.raises(CorruptImage):
        decode(file, 32)


# Sources


def folders(root, classes=("cat", "dog"), count=10, corrupt=()):
    """Class folders of PNG files, those numbered in `corrupt` cut off."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            content = encoded(Image.new("RGB", (20, 16), (100 * label, 10 * i, 50)))
            (root / name / f"{i}.png").write_bytes(content[:-40] if i in corrupt else content)
    return root


def test_class_folders_are_classes_and_validation_has_their_numbers(tmp_path):
    folders(tmp_path / "train", ("ant", "bee", "cow"))
    folders(tmp_path / "valid", ("bee", "cow"), count=2)
    (tmp_path / "train/ant/notes.txt").write_text("no image")
    (tmp_path / "train/.hidden").mkdir()
    train, validation = load_sources(config(train_dir=str(tmp_path / "train"), validation_dir=str(tmp_path / "valid")))
    assert train.names == validation.names == ("ant", "bee", "cow")
    assert np.bincount(train.targets).tolist() == [10, 10, 10]
    assert validation.targets.tolist() == [1, 1, 2, 2]
    assert validation.stored(0) == tmp_path / "valid/bee/0.png"


@given(st.lists(st.integers(11, 40), min_size=2, max_size=6), st.integers(10, 60), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_share_of_each_class_is_held_out_to_one_image(counts, percentage, seed):
    source = digits()
    source = source.take(np.concatenate([np.flatnonzero(source.targets == c)[:n] for c, n in enumerate(counts)]))
    train, validation = hold_out(source, percentage, seed)
    assert sorted([*train.rows, *validation.rows]) == sorted(source.rows)
    assert abs(len(validation) - len(source) * percentage / 100) < 1
    held_out = np.bincount(validation.targets, minlength=len(counts))
    assert (np.abs(held_out - np.array(counts) * percentage / 100) < 1).all()
    again, _ = hold_out(source, percentage, seed)
    assert np.array_equal(again.rows, train.rows)


def test_a_class_of_one_image_stays_in_training(tmp_path):
    folders(tmp_path, ("cat", "dog"))
    folders(tmp_path, ("ant", "yak"), count=1)
    train, validation = load_sources(config(train_dir=str(tmp_path)))
    assert np.bincount(train.targets, minlength=4)[[0, 3]].tolist() == [1, 1]
    assert 3 <= len(validation) <= 4


def test_other_seeds_hold_out_others_and_fifths_are_disjoint():
    source = digits()
    parts = [set(hold_out(source, 20, seed)[1].rows) for seed in (0, 1)]
    assert parts[0] != parts[1]
    folds = [by_class(source.targets, 0)[fold::5] for fold in range(5)]
    assert sorted(np.concatenate(folds)) == list(range(1797))


def tables(tmp_path, image_type="struct", rows=10):
    images = [encoded(Image.new("RGB", (8, 8), (25 * i, 0, 0))) for i in range(rows)]
    column = [{"bytes": image, "path": None} for image in images] if image_type == "struct" else images
    labels = ["odd" if i % 2 else "even" for i in range(rows)]
    columns = {"image": column, "label": labels, "row": range(rows)}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "images.parquet")
    return str(tmp_path / "images.parquet")


@pytest.mark.parametrize("image_type", ["struct", "bytes"])
def test_parquet_with_an_image_column(tmp_path, image_type):
    train, validation = load_images(config(train_file=tables(tmp_path, image_type)), 8)
    assert train.source.names == ("even", "odd")
    assert (len(train), len(validation)) == (8, 2)
    for data in (train, validation):
        for pixels, _, target in (data[i] for i in range(len(data))):
            assert (pixels[0, 0, 0] // 25) % 2 == target


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_column_of_paths_begins_in_the_folder_of_the_file(tmp_path, monkeypatch, kind, absolute):
    root = folders(tmp_path / "photos", count=5)
    files = sorted(root.rglob("*.png"))
    rows = {"file": [str(file if absolute else file.relative_to(root)) for file in files]}
    rows["kind"] = [file.parent.name for file in files]
    write = pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table
    write(pa.table(rows), root / f"rows.{kind}")
    columns = {"image_column_name": "file", "label_column_name": "kind"}
    given = config(train_file=str(root / f"rows.{kind}"), **columns)
    train, validation = load_images(given, 8)
    expected, held_out = load_images(config(train_dir=str(root)), 8)
    assert (train.source.names, len(train), len(validation)) == (("cat", "dog"), 8, 2)
    assert [train.digest(), validation.digest()] == [expected.digest(), held_out.digest()]
    assert [train[i][0].tolist() for i in range(8)] == [expected[i][0].tolist() for i in range(8)]
    monkeypatch.chdir(root)
    again, _ = load_images(config(train_file=f"rows.{kind}", cache="uint8", **columns), 8)
    assert again.digest() == train.digest()
    files[3].write_bytes(b"broken")
    with pytest.raises(UserError, match=rf"row 4 of --train_file .*: {'' if absolute else '.*'}{files[3]} is corrupt"):
        load_images(given, 8)
    files[3].unlink()
    with pytest.raises(
        UserError, match=r"row 4 of --train_file .* names '.*cat/3.png', and there is no file .*cat/3.png"
    ):
        load_images(given, 8)


def test_structs_of_datasets_that_hold_paths_only(tmp_path):
    root = folders(tmp_path / "photos", count=5)
    cells = [{"bytes": None, "path": str(file)} for file in sorted(root.rglob("*.png"))]
    pyarrow.parquet.write_table(pa.table({"image": cells, "label": [0] * 5 + [1] * 5}), tmp_path / "rows.parquet")
    train, _ = load_images(config(train_file=str(tmp_path / "rows.parquet")), 8)
    assert train[0][0].shape == (8, 8, 3)


def test_folders_of_save_to_disk_with_their_class_names(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "blue"])})
    pictures = [Image.new("RGB", (8, 8), RED if i % 2 == 0 else BLUE) for i in range(10)]
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(10)]}, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows.select([1, 2])}).save_to_disk(tmp_path / "saved")
    train, validation = load_images(config(dataset_name=str(tmp_path / "saved")), 8)
    assert train.source.names == ("red", "blue")
    assert (len(train), len(validation)) == (10, 2)
    assert [int(pixels[0, 0, 2] > 100) for pixels, *_ in (train[i] for i in range(10))] == train.targets.tolist()
    datasets.DatasetDict({"train": rows, "test": rows.select([4, 3, 1])}).save_to_disk(tmp_path / "cifar")  # as it has
    train, validation = load_images(config(dataset_name=str(tmp_path / "cifar")), 8)
    assert (len(train), validation.targets.tolist()) == (10, [0, 1, 1])


def test_classes_of_a_validation_file_are_those_of_its_names(tmp_path):
    import datasets

    rows = {"image": [Image.new("RGB", (8, 8), (RED, BLUE)[i % 2]) for i in range(6)]}
    for name, names in (("train", ["red", "blue"]), ("valid", ["blue", "red"])):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        labels = [names.index(("red", "blue")[i % 2]) for i in range(6)]
        table = datasets.Dataset.from_dict(rows | {"label": labels}, features=features)
        table.to_parquet(tmp_path / f"{name}.parquet")
    files = {"train_file": str(tmp_path / "train.parquet"), "validation_file": str(tmp_path / "valid.parquet")}
    train, validation = load_images(config(**files), 8)
    assert train.source.names == validation.source.names == ("red", "blue")
    assert train.targets.tolist() == validation.targets.tolist() == [0, 1, 0, 1, 0, 1]


def test_what_a_user_can_get_wrong_is_refused(tmp_path):
    good = folders(tmp_path / "good")
    folders(tmp_path / "other", ("cat", "fox"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing/cat").mkdir(parents=True)
    (tmp_path / "nothing/dog").mkdir()
    parquet = tables(tmp_path)
    for flags, said in (
        ({"train_dir": tmp_path / "none"}, f"--train_dir {tmp_path / 'none'}: no such folder"),
        ({"train_dir": parquet}, "is a file: give a folder"),
        ({"train_dir": tmp_path / "empty"}, "has 0 subfolders, and each is a class"),
        ({"train_dir": tmp_path / "nothing"}, "the class cat has no image (.jpg"),
        ({"train_dir": good, "validation_dir": tmp_path / "other"}, "has a class fox that --train_dir does not have"),
        ({"train_dir": good, "train_file": parquet}, "give one of them"),
        ({"train_dir": good, "validation_split_percentage": 1}, "too few to hold out 1 % of each class"),
        ({"train_file": parquet, "image_column_name": "photo"}, "--image_column_name photo"),
        ({"train_file": parquet, "image_column_name": "row"}, "holds int64 there, not images as bytes"),
        ({"train_file": parquet, "label_column_name": "class"}, "--label_column_name class"),
    ):
        with pytest.raises(UserError) as caught:
            load_sources(
                config(**{name: str(v) if name != "validation_split_percentage" else v for name, v in flags.items()})
            )
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


# Splits inside a folder, and what is no image there


def test_a_folder_with_splits_inside_is_used_as_such_and_said(tmp_path, capsys):
    for split in ("Train", "val", "test"):
        folders(tmp_path / "shapes" / split, ("disc", "square"), count=3 if split == "Train" else 2)
    (tmp_path / "shapes/notes").mkdir()
    train, validation = load_sources(config(train_dir=str(tmp_path / "shapes")))
    assert train.names == validation.names == ("disc", "square")
    assert (len(train), len(validation)) == (6, 4)
    assert validation.stored(0) == tmp_path / "shapes/val/disc/0.png"
    assert "Train is trained on, val validates; not used: notes, test" in capsys.readouterr().err
    by_name, _ = load_sources(config(dataset_name=str(tmp_path / "shapes")))
    given, other = load_sources(
        config(train_dir=str(tmp_path / "shapes/Train"), validation_dir=str(tmp_path / "shapes"))
    )
    assert train.digest() == by_name.digest() == given.digest()
    assert validation.digest() == other.digest()


def test_splits_are_told_from_classes(tmp_path):
    for name in ("train", "bus"):
        folders(tmp_path / "vehicles", (name,), count=3)
    (tmp_path / "vehicles/train/steam").mkdir()
    assert load_sources(config(train_dir=str(tmp_path / "vehicles"), validation_split_percentage=40))[0].names == (
        "bus",
        "train",
    )
    folders(tmp_path / "alone/training", ("disc", "square"), count=3)
    train, validation = load_sources(config(train_dir=str(tmp_path / "alone"), validation_split_percentage=40))
    assert train.names == ("disc", "square")
    assert len(validation) == 2
    folders(tmp_path / "flat", ("train", "val"))
    folders(tmp_path / "trainless/val")
    folders(tmp_path / "trainless/test")
    for folder, said in (
        ("flat", "its folders train and val are named like splits and have no folders inside"),
        ("trainless", "holds the splits test, val and no train"),
    ):
        with pytest.raises(UserError, match=said):
            load_sources(config(train_dir=str(tmp_path / folder)))


def test_what_is_hidden_or_no_regular_file_is_passed_over_and_counted(tmp_path, capsys):
    root = folders(tmp_path / "train", count=4)
    (root / "cat/._1.jpg").write_bytes(b"a resource fork")
    (root / "cat/.ipynb_checkpoints").mkdir()
    (root / "cat/.ipynb_checkpoints/0-checkpoint.png").write_bytes(b"")
    (root / "dog/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (root / "dog/folder.png").mkdir()
    (root / "dog/notes.txt").write_text("no image")
    (root / ".DS_Store").write_bytes(b"")
    (root / "loose.png").write_bytes(b"")
    source = class_folders(str(root), "--train_dir")
    assert len(source) == 8
    assert not source.corrupt()
    assert capsys.readouterr().err == (
        f"--train_dir {root}: passed over 3 hidden, 1 in no class's folder, 2 no regular file (a folder, or a link "
        "that is broken or leads to one), 1 not named like an image (.txt)\n"
    )


# What tells other data from these


def replaced(path, color):
    """Other pixels in a file of the same length, with the same times of access and modification."""
    before = path.stat()
    path.write_bytes(encoded(Image.new("RGB", (20, 16), color), "BMP"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def bitmaps(root, names=("0", "1", "2", "3", "4"), classes=("cat", "dog"), first=0):
    for label, kind in enumerate(classes):
        (root / kind).mkdir(parents=True)
        for i, name in enumerate(names):
            pixels = Image.new("RGB", (20, 16), (100 * label, 10 * i + first, 50))
            (root / kind / f"{name}.bmp").write_bytes(encoded(pixels, "BMP"))
    return root


def digests(root, **changed):
    return [data.digest() for data in load_images(config(train_dir=str(root), **changed), 8)]


def test_a_digest_is_that_of_the_images_wherever_they_lie_and_however_they_are_read(tmp_path, monkeypatch):
    expected = digests(bitmaps(tmp_path / "here"))
    assert digests(tmp_path / "here", cache="uint8") == expected
    assert digests(tmp_path / "here", skip_corrupt_images=True) == expected
    shutil.copytree(tmp_path / "here", tmp_path / "copied", copy_function=shutil.copyfile)  # with times of its own
    assert digests(tmp_path / "copied") == digests(tmp_path / "copied", cache="uint8") == expected
    (tmp_path / "here").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert digests("moved") == digests("./copied") == digests("copied/../moved") == expected
    (tmp_path / "linked").symlink_to("moved")
    assert digests("linked", cache="uint8") == expected


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_a_digest_tells_other_images_names_and_classes(tmp_path, cache):
    seen = [digests(bitmaps(tmp_path / "here"), cache=cache)]
    bitmaps(tmp_path / "other", names="abcde", first=100)
    seen.append(digests(tmp_path / "other", cache=cache))
    seen.append(digests(bitmaps(tmp_path / "named", names="abcde"), cache=cache))
    seen.append(digests(bitmaps(tmp_path / "classes", classes=("cow", "dog")), cache=cache))
    replaced(tmp_path / "here/cat/0.bmp", (1, 2, 3))
    replaced(tmp_path / "here/dog/0.bmp", (1, 2, 3))
    train, validation = load_images(config(train_dir=str(tmp_path / "here"), cache=cache), 8)
    seen.append([train.digest(), validation.digest()])
    assert len({tuple(found) for found in seen}) == len(seen)
    assert [train[0][0][0, 0].tolist(), train[4][0][0, 0].tolist()] == [[1, 2, 3]] * 2  # nor is the cache the old one


@pytest.mark.parametrize("image_type", ["struct", "bytes"])
def test_a_digest_tells_a_table_with_other_images_of_the_same_size(tmp_path, image_type):
    seen = []
    for blue in (0, 0, 9):
        images = [encoded(Image.new("RGB", (8, 8), (25 * i, 0, blue if i == 3 else 0)), "BMP") for i in range(10)]
        column = [{"bytes": image, "path": None} for image in images] if image_type == "struct" else images
        table = pa.table({"image": column, "label": [i % 2 for i in range(10)]})
        pyarrow.parquet.write_table(table, tmp_path / "images.parquet", row_group_size=4 + len(seen))
        seen.append(tuple(d.digest() for d in load_images(config(train_file=str(tmp_path / "images.parquet")), 8)))
    assert seen[0] == seen[1] != seen[2]


def test_the_sizes_and_bytes_of_a_column_tell_it_from_others_in_parts_too(monkeypatch):
    cells = [bytes([i]) * (i + 1) for i in range(50)]
    whole = pa.chunked_array([pa.array(cells)])
    views = pa.chunked_array([pa.array([b"", *cells]).slice(1).cast(pa.binary_view())])
    assert key_of_column(whole) == key_of_column(views)
    longer, other = [*cells[:20], bytes(30), *cells[21:]], [*cells[:20], bytes(21), *cells[21:]]
    for hashed in (1 << 30, 600):  # all bytes; about half of them
        monkeypatch.setattr(checks, "PIECE", 7)
        monkeypatch.setattr(checks, "HASHED", hashed)
        keys = [key_of_column(pa.chunked_array([pa.array(column)])) for column in (cells, longer, other)]
        assert len(set(keys)) == 3
    assert key_of_column(pa.chunked_array([pa.array([b"", None], pa.binary())]))


# Corrupt images, and the cache


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_a_corrupt_image_ends_the_run_naming_its_file(tmp_path, cache):
    folders(tmp_path / "train", corrupt=[3])
    given = config(train_dir=str(tmp_path / "train"), cache=cache)

    def read_all():
        return [[data[i] for i in range(len(data))] for data in load_images(given, 8)]

    with pytest.raises(UserError, match=r"train/(cat|dog)/3\.png is corrupt .*--skip_corrupt_images"):
        read_all()


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_corrupt_images_are_left_out_counted_and_listed(tmp_path, capsys, cache):
    folders(tmp_path / "train", corrupt=[3, 7])
    folders(tmp_path / "valid")
    given = config(train_dir=str(tmp_path / "train"), validation_dir=str(tmp_path / "valid"), cache=cache)
    given.skip_corrupt_images = True
    for _ in range(2):  # the second time from what is known
        train, validation = load_images(given, 8)
        said = capsys.readouterr().err
        assert "4 of 20 images are corrupt and left out" in said
        assert said.count("3.png") == said.count("7.png") == 2
        assert (len(train), len(validation)) == (16, 10 + 10)
        greens = sorted(int(train[i][0][0, 0, 1]) for i in range(16))
        assert greens == sorted([10 * i for i in range(10) if i not in (3, 7)] * 2)


def test_the_cache_has_the_same_pixels_is_written_once_and_follows_its_files(tmp_path, monkeypatch):
    root = folders(tmp_path / "train")
    source = class_folders(str(root), "--train_dir")
    plain = prepare(source, config(), 8)
    cached = prepare(source, config(cache="uint8"), 8)
    for i in range(len(source)):
        assert np.array_equal(plain[i][0], cached[i][0])
        assert plain[i][1:] == cached[i][1:]
    assert isinstance(cached.pixels, np.memmap)
    decoded = []
    monkeypatch.setattr(image_cache, "decode", lambda *args: decoded.append(args) or decode(*args))
    prepare(source, config(cache="uint8"), 8)
    assert not decoded
    (root / "cat/0.png").write_bytes(encoded(Image.new("RGB", (20, 16), (1, 2, 3))))
    changed = prepare(source, config(cache="uint8"), 8)
    assert len(decoded) == 20
    assert changed[0][0][0, 0].tolist() == [1, 2, 3]
    other_size = prepare(source, config(cache="uint8"), 4)
    assert other_size[0][0].shape == (4, 4, 3)


def test_a_table_that_changes_gets_another_cache(tmp_path):
    names = set()
    for rows in (10, 11):
        (source, _) = load_sources(config(train_file=tables(tmp_path, rows=rows)))
        names.add(source.key())
    assert len(names) == 2


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_headers_are_looked_at_before_the_run_once_per_machine(tmp_path, monkeypatch, cache):
    root = folders(tmp_path / "train")
    (root / "cat/0.png").write_bytes(b"")
    (root / "cat/1.png").write_bytes(b"no image")
    for name in ("2", "3", "4"):
        (root / f"cat/{name}.png").unlink()
    (root / "cat/2.jpg").write_bytes(encoded(quarters(), "JPEG")[:-200])
    given = config(train_dir=str(root), validation_dir=str(root), cache=cache)
    looked = []
    monkeypatch.setattr(checks, "inspect", lambda stored: looked.append(stored) or inspect(stored))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"cat/0.png is corrupt \(0 bytes\), and so are 2 more, such as .*1.png.*2.jpg"
        ):
            load_images(given, 8)
    assert len(looked) == 18
    for name in ("0.png", "1.png", "2.jpg"):
        (root / f"cat/{name}").write_bytes(encoded(quarters(), "JPEG"))
    load_images(given, 8)
    assert len(looked) == 2 * 18


def test_corrupt_images_of_a_table_are_named_before_the_run(tmp_path):
    images = [encoded(quarters())[: 60 if i == 4 else None] for i in range(10)]
    table = pa.table({"image": images, "label": [i % 2 for i in range(10)]})
    pyarrow.parquet.write_table(table, tmp_path / "images.parquet")
    with pytest.raises(UserError, match=r"row 5 of --train_file .* is corrupt"):
        load_images(config(train_file=str(tmp_path / "images.parquet")), 8)


def test_a_file_that_cannot_be_read_is_not_called_corrupt(tmp_path, monkeypatch):
    root = folders(tmp_path / "train")
    whole = Path.open

    def fail(path, *args, **kwargs):
        if path.name == "7.png":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match=r"the image .*/7\.png cannot be read \(Input/output error\)"):
        load_images(config(train_dir=str(root)), 8)


def test_images_of_more_than_eight_bits_are_named(tmp_path, capsys):
    root = folders(tmp_path / "train")
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(root / "cat/1.png")
    load_images(config(train_dir=str(root)), 8)
    assert f"1 images have more than 8 bits per pixel and channel, such as --train_dir {root}: {root}/cat/1.png" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1)])
def test_images_of_any_shape_give_squares(size):
    pixels, aspect = decode(encoded(Image.new("RGB", size, RED)), 8)
    assert (pixels.shape, aspect) == ((8, 8, 3), size[0] / size[1])
    geometry = load_processor(SimpleNamespace(model_name_or_path=None, image_size=8, resize_size=10))[1]
    batch = collate([(pixels, aspect, 0)])
    found = Augmentation(seed=0, geometry=geometry).evaluation(batch)
    assert found.std((0, 2, 3)).max() < 1e-6


def test_images_that_are_too_large_for_pillow_are_named_as_such(monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(CorruptImage, match="more than 1,000 pixels, which Pillow refuses to decode: scale it down"):
        decode(encoded(quarters()), 8)
    with pytest.raises(CorruptImage, match="more than 1,000 pixels"):
        inspect(encoded(quarters()))


@pytest.mark.parametrize("name", ["a\nb", "caf\udce9"])
def test_classes_whose_names_are_no_text_are_refused(tmp_path, name):
    folders(tmp_path / "train", ("dog", name))
    with pytest.raises(UserError, match="whose name is not text: rename the folder"):
        load_sources(config(train_dir=str(tmp_path / "train")))
    names = ("\u732b", "a b\u3000c", "d\u2019or")
    assert class_folders(str(folders(tmp_path / "other", names)), "--train_dir").names == tuple(sorted(names))


def test_batches_and_the_worst_images():
    source = digits()
    data = prepare(source, config(), 8)
    batch = collate([data[i] for i in range(3)])
    at_once = collate(data.read_micro_batch(np.arange(3), np.zeros(3, int)))
    assert all(torch.equal(batch[name], at_once[name]) for name in batch)
    assert batch["images"].shape == (3, 8, 8, 3)
    assert batch["aspects"].tolist() == [1, 1, 1]
    assert batch["labels"].tolist() == source.targets[:3].tolist()
    ranked = np.stack([source.targets, (source.targets + 1) % 10], 1)
    ranked[[4, 9, 11]] = ranked[[4, 9, 11], ::-1]
    losses = np.zeros(len(source))
    losses[[4, 9, 11]] = 1.0, 3.0, 2.0
    shown = worst_predictions(data, ranked, losses, count=2)
    assert [np.array_equal(p.pixels, data[i][0]) for p, i in zip(shown, (9, 11), strict=True)] == [True, True]
    assert (shown[0].says, shown[0].truth) == (str((source.targets[9] + 1) % 10), str(source.targets[9]))
    assert json.dumps([shown[0].says, shown[0].truth, shown[0].aspect])


def test_a_limit_leaves_some_images_of_each_part_and_rows_without_one_are_left_out_on_request(tmp_path):
    limited = config(train_file=tables(tmp_path, rows=20), max_train_samples=5, max_eval_samples=2)
    train, validation = load_images(limited, 8)
    assert (len(train), len(validation)) == (5, 2)
    rows = pyarrow.parquet.ParquetFile(limited.train_file).read().to_pylist()
    rows[3]["image"] = rows[4]["label"] = None
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), limited.train_file)
    with pytest.raises(UserError, match=r"row 5 of .* no label in label: fill it in, or leave such rows out"):
        load_images(limited, 8)
    everything = load_images(config(train_file=limited.train_file, skip_incomplete_rows=True), 8)
    assert sum(map(len, everything)) == 18
