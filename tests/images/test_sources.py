"""Sources of images (folders of classes, columns of tables) and their classes."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import runs
from PIL import Image
from small_images import BLUE, EIGHT, RED, config, folders, tables

from shared.errors import UserError
from shared.images.sources import class_folders, load_images, load_sources


def test_class_folders_are_classes_and_validation_uses_the_same_ids(tmp_path):
    folders(tmp_path / "train", ("ant", "bee", "cow"))
    folders(tmp_path / "valid", ("bee", "cow"), count=2)
    train, validation = load_sources(config(train_dir=str(tmp_path / "train"), validation_dir=str(tmp_path / "valid")))
    assert train.names == validation.names == ("ant", "bee", "cow")
    assert np.bincount(train.targets).tolist() == [10, 10, 10]
    assert validation.targets.tolist() == [1, 1, 2, 2]
    assert validation.stored(0) == tmp_path / "valid/bee/0.png"


@pytest.mark.parametrize("image_type", ["struct", "bytes"])
def test_a_parquet_file_with_an_image_column_is_read(tmp_path, image_type):
    train, validation = load_images(config(train_file=tables(tmp_path, image_type)), EIGHT)
    assert train.names == ("even", "odd")
    assert (len(train), len(validation)) == (8, 2)
    for data in (train, validation):
        for pixels, _, target in (data[i] for i in range(len(data))):
            assert (pixels[0, 0, 0] // 25) % 2 == target


@pytest.mark.parametrize(
    ("kind", "absolute"), [("csv", False), ("parquet", False), ("parquet", True), ("structs", True)]
)
def test_paths_in_a_column_are_relative_to_the_folder_of_the_file(tmp_path, monkeypatch, kind, absolute):
    root = folders(tmp_path / "photos", count=5)
    files = sorted(root.rglob("*.png"))
    rows = {"file": [str(file if absolute else file.relative_to(root)) for file in files]}
    rows["kind"] = [file.parent.name for file in files]
    if kind == "structs":
        rows["file"] = [{"bytes": None, "path": file} for file in rows["file"]]
    ending = "csv" if kind == "csv" else "parquet"
    write = pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table
    write(pa.table(rows), root / f"rows.{ending}")
    columns = {"image_column_name": "file", "label_column_name": "kind"}
    given = config(train_file=str(root / f"rows.{ending}"), **columns)
    train, validation = load_images(given, EIGHT)
    expected, held_out = load_images(config(train_dir=str(root)), EIGHT)
    assert (train.names, len(train), len(validation)) == (("cat", "dog"), 8, 2)
    assert [train.digest(), validation.digest()] == [expected.digest(), held_out.digest()]
    assert [train[i][0].tolist() for i in range(8)] == [expected[i][0].tolist() for i in range(8)]
    monkeypatch.chdir(root)
    again, _ = load_images(config(train_file=f"rows.{ending}", cache="uint8", **columns), EIGHT)
    assert again.digest() == train.digest()
    files[3].write_bytes(b"broken")
    with pytest.raises(UserError, match=rf"row 4 of --train_file .*: {'' if absolute else '.*'}{files[3]} is corrupt"):
        load_images(given, EIGHT)
    files[3].unlink()
    with pytest.raises(UserError, match=r"--train_file .*, whose paths are relative to .*No such file.*cat/3.png"):
        load_images(given, EIGHT)


def test_save_to_disk_folders_are_read_with_their_class_names(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "blue"])})
    pictures = [Image.new("RGB", (8, 8), RED if i % 2 == 0 else BLUE) for i in range(10)]
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(10)]}, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows.select([1, 2])}).save_to_disk(tmp_path / "saved")
    train, validation = load_images(config(dataset_name=str(tmp_path / "saved")), EIGHT)
    assert train.names == ("red", "blue")
    assert (len(train), len(validation)) == (10, 2)
    assert [int(pixels[0, 0, 2] > 100) for pixels, *_ in (train[i] for i in range(10))] == train.targets.tolist()


def test_wrong_folders_and_flags_are_refused(tmp_path):
    good = folders(tmp_path / "good")
    folders(tmp_path / "other", ("cat", "fox"))
    for name in ("empty", "nothing/cat", "nothing/dog"):
        (tmp_path / name).mkdir(parents=True)
    parquet = tables(tmp_path)
    for flags, expected in (
        ({"train_dir": tmp_path / "none"}, f"--train_dir {tmp_path / 'none'}: [Errno 2] No such file"),
        ({"train_dir": parquet}, "Not a directory"),
        ({"train_dir": tmp_path / "empty"}, "has 0 subfolders, and each class needs one"),
        ({"train_dir": tmp_path / "nothing"}, "the class cat has no image (.jpg"),
        ({"train_dir": good, "validation_dir": tmp_path / "other"}, "a class fox that the training images do not"),
        ({"train_file": parquet, "image_column_name": "photo"}, "--image_column_name photo"),
        ({"train_file": parquet, "image_column_name": "row"}, "holds int64 there, not images as bytes"),
        ({"train_file": parquet, "image_column_name": "several"}, "binary[4]> there, not images as bytes"),
        ({"train_file": parquet, "label_column_name": "class"}, "--label_column_name class"),
    ):
        assert expected in runs.refusal(load_sources, config(**{name: str(value) for name, value in flags.items()}))
    message = runs.refusal(load_sources, config(train_dir=str(good)), "regression")
    assert message.endswith("has classes, and regression needs a column of numbers: use --train_file")


def test_splits_are_distinguished_from_classes(tmp_path):
    for name in ("train", "bus"):
        folders(tmp_path / "vehicles", (name,), count=3)
    settings = config(train_dir=str(tmp_path / "vehicles"), validation_split_percentage=40)
    assert load_sources(settings)[0].names == ("bus", "train")
    for split in ("Train", "val"):
        folders(tmp_path / "shapes" / split, ("disc", "square"))
        (tmp_path / "shapes/notes").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"has splits \(Train, val\), not classes: give --train_dir"):
        load_sources(config(train_dir=str(tmp_path / "shapes")))


def test_other_files_are_skipped_and_counted(tmp_path, capsys):
    root = folders(tmp_path / "train", count=4)
    for name in ("cat/._1.jpg", ".DS_Store", "loose.png", "dog/notes.txt"):
        (root / name).write_bytes(b"")
    assert len(class_folders(str(root), "--train_dir")) == 8
    passed_over = "passed over 1 hidden, 2 in no class's folder, 1 of other kinds"
    assert capsys.readouterr().err == f"--train_dir {root}: {passed_over}\n"


@pytest.mark.parametrize("name", ["a\nb", "caf\udce9"])
def test_classes_whose_names_are_not_text_are_refused(tmp_path, name):
    folders(tmp_path / "train", ("dog", name))
    with pytest.raises(UserError, match="whose name is not text: rename the folder"):
        load_sources(config(train_dir=str(tmp_path / "train")))
    names = ("\u732b", "a b\u3000c", "d\u2019or")
    assert class_folders(str(folders(tmp_path / "other", names)), "--train_dir").names == tuple(sorted(names))
