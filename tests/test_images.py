"""Images of every kind come out right; what cannot be read is named, or left out before the run."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.datasets import image_cache
from shared.datasets.decoding import CorruptImage, decode
from shared.datasets.image_sources import class_folders, digits, hold_out, load_sources
from shared.datasets.images import collate, load_images, prepare, worst
from shared.datasets.splits import by_class
from shared.errors import UserError

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


def test_transparent_pixels_are_white_whatever_color_hides_there():
    image = quarters().convert("RGBA")
    image.paste((255, 0, 255, 0), (0, 0, 20, 20))
    assert close(corners(decode(encoded(image), 32)[0]), [(255, 255, 255), GREEN, BLUE, GREY])
    palette = Image.new("P", (40, 40), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.paste(1, (20, 0, 40, 40))
    found = corners(decode(encoded(palette, transparency=0), 32)[0])
    assert close(found, [(255, 255, 255), (200, 0, 0), (255, 255, 255), (200, 0, 0)])
    half = Image.new("LA", (40, 40), (0, 128))
    assert close(corners(decode(encoded(half), 32)[0]), [(127, 127, 127)] * 4)


def test_sixteen_bits_are_scaled_and_not_cut():
    deep = np.repeat(np.linspace(0, 65535, 40).astype(np.uint16)[None], 40, axis=0)
    for kind in ("PNG", "TIFF"):
        pixels, _ = decode(encoded(Image.fromarray(deep), kind), 40)
        assert close(pixels[:, :, 0], deep >> 8, 2)
    floats = Image.fromarray((deep / 65535).astype(np.float32))
    assert close(decode(encoded(floats, "TIFF"), 40)[0][:, :, 1], deep >> 8, 3)


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
    pyarrow.parquet.write_table(pa.table({"image": column, "label": labels}), tmp_path / "images.parquet")
    return str(tmp_path / "images.parquet")


@pytest.mark.parametrize("image_type", ["struct", "bytes"])
def test_parquet_with_an_image_column(tmp_path, image_type):
    train, validation = load_images(config(train_file=tables(tmp_path, image_type)), 8)
    assert train.source.names == ("even", "odd")
    assert (len(train), len(validation)) == (8, 2)
    for data in (train, validation):
        for pixels, _, target in (data[i] for i in range(len(data))):
            assert (pixels[0, 0, 0] // 25) % 2 == target


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
        ({"train_file": parquet, "image_column_name": "label"}, "holds string there, not images as bytes"),
        ({"train_file": parquet, "label_column_name": "class"}, "--label_column_name class"),
    ):
        with pytest.raises(UserError) as caught:
            load_sources(
                config(**{name: str(v) if name != "validation_split_percentage" else v for name, v in flags.items()})
            )
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


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
        names.add(image_cache.digest(source, b""))
    assert len(names) == 2


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
    shown = worst(data, ranked, losses, count=2)
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
