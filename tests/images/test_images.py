"""Image data sets have a digest of their content; corrupt images are named or left out."""

import base64
import io
import os
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image
from small_images import EIGHT, config, encoded, folders, tables

from shared.errors import UserError
from shared.images.sources import load_images


def bitmaps(root, names=("0", "1", "2", "3", "4"), classes=("cat", "dog"), first=0):
    for label, kind in enumerate(classes):
        (root / kind).mkdir(parents=True)
        for i, name in enumerate(names):
            pixels = Image.new("RGB", (20, 16), (100 * label, 10 * i + first, 50))
            (root / kind / f"{name}.bmp").write_bytes(encoded(pixels, "BMP"))
    return root


def digests(root, **changed):
    return [data.digest() for data in load_images(config(train_dir=str(root), **changed), EIGHT)]


def test_the_digest_does_not_depend_on_the_place_of_the_images_or_how_they_are_read(tmp_path, monkeypatch):
    expected = ["5c1715b99409ba2872009ba83f1d9771", "e1eee715c374121bba52730a20757694"]  # runs can be resumed
    assert digests(bitmaps(tmp_path / "here")) == digests(tmp_path / "here", cache="uint8") == expected
    assert digests(tmp_path / "here", skip_corrupt_images=True) == expected
    shutil.copytree(tmp_path / "here", tmp_path / "copied", copy_function=shutil.copyfile)  # with new times
    assert digests(tmp_path / "copied") == digests(tmp_path / "copied", cache="uint8") == expected
    (tmp_path / "here").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert digests("moved") == digests("./copied") == digests("copied/../moved") == expected
    (tmp_path / "linked").symlink_to("moved")
    assert digests("linked", cache="uint8") == expected


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_the_digest_changes_with_images_names_and_classes(tmp_path, cache):
    others = {"here": {}, "other": {"first": 100}, "named": {"names": "abcde"}, "classes": {"classes": ("cow", "dog")}}
    seen = [digests(bitmaps(tmp_path / name, **changed), cache=cache) for name, changed in others.items()]
    for path in (tmp_path / "here/cat/0.bmp", tmp_path / "here/dog/0.bmp"):
        before = path.stat()
        path.write_bytes(encoded(Image.new("RGB", (20, 16), (1, 2, 3)), "BMP"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the length and these times stay
    train, validation = load_images(config(train_dir=str(tmp_path / "here"), cache=cache), EIGHT)
    seen.append([train.digest(), validation.digest()])
    assert len({tuple(found) for found in seen}) == len(seen)
    assert [train[0][0][0, 0].tolist(), train[4][0][0, 0].tolist()] == [[1, 2, 3]] * 2  # so the cache was rebuilt


@pytest.mark.parametrize("image_type", ["struct", "bytes"])
def test_the_digest_of_a_table_changes_with_images_of_the_same_size(tmp_path, image_type):
    seen = []
    for blue in (0, 0, 9):
        images = [encoded(Image.new("RGB", (8, 8), (25 * i, 0, blue if i == 3 else 0)), "BMP") for i in range(10)]
        column = [{"bytes": image, "path": None} for image in images] if image_type == "struct" else images
        table = pa.table({"image": column, "label": [i % 2 for i in range(10)]})
        pyarrow.parquet.write_table(table, tmp_path / "images.parquet", row_group_size=4 + len(seen))
        seen.append(tuple(d.digest() for d in load_images(config(train_file=str(tmp_path / "images.parquet")), EIGHT)))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(("resize", "height"), [(None, 77), (8, 96)])
def test_a_picture_has_the_shape_of_what_the_model_sees(tmp_path, resize, height):
    _, validation = load_images(config(train_dir=str(folders(tmp_path / "train"))), replace(EIGHT, resize=resize))
    encoded_picture = validation.picture(0)["picture"].partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(encoded_picture))).size == (96, height)


# Corrupt images, and limits


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_corrupt_images_are_left_out_counted_and_listed(tmp_path, capsys, cache):
    folders(tmp_path / "train", corrupt=[3, 7])
    folders(tmp_path / "valid")
    folder = {"train_dir": str(tmp_path / "train"), "validation_dir": str(tmp_path / "valid")}
    given = config(**folder, cache=cache, skip_corrupt_images=True)
    for _ in range(2):  # the second time with the stored result of the check
        train, validation = load_images(given, EIGHT)
        output = capsys.readouterr().err
        assert "4 of 20 images are corrupt and left out" in output
        assert output.count("3.png") == output.count("7.png") == 2
        assert (len(train), len(validation)) == (16, 10 + 10)
        greens = sorted(int(train[i][0][0, 0, 1]) for i in range(16))
        assert greens == sorted([10 * i for i in range(10) if i not in (3, 7)] * 2)


def test_a_limit_keeps_some_images_of_each_part_and_incomplete_rows_are_skipped_on_request(tmp_path):
    file = tables(tmp_path, rows=20)
    rows = pyarrow.parquet.ParquetFile(file).read().to_pylist()
    rows[3]["image"], rows[2]["image"], rows[4]["label"] = dict.fromkeys(rows[3]["image"]), None, None
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(UserError, match=r"row 5 of .* no label in label: fill it in, or skip such rows"):
        load_images(config(train_file=file), EIGHT)
    given = config(train_file=file, skip_incomplete_rows=True, max_train_samples=5)
    train, validation = load_images(given, EIGHT)
    assert (len(train), len(validation)) == (5, 3)
