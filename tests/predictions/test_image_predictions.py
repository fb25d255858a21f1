"""`python -m shared.predict` for images: folders, columns of paths and of bytes, equal to transformers' pipeline."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from PIL import Image
from predicting import predict_file, read_csv, read_jsonl, write_csv, write_resnet
from runs import refusal
from sklearn.datasets import load_digits
from small_images import encoded

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of a short run on the digits, and its last evaluation."""
    output = tmp_path_factory.mktemp("digits") / "run"
    sizes = ["--resize_size", 19, "--decode_size", 20]
    flags = [*runs.TINY_IMAGES, *sizes, "--max_train_steps", 20, "--eval_steps", 20]
    return output, runs.train("image_classification", output, *flags)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with a subfolder for each class, of images with the size of the model's input."""
    found, folder = load_digits(), tmp_path_factory.mktemp("images") / "digits"
    for number in range(30):
        path = folder / str(found.target[number]) / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((found.images[number] * 15).astype("uint8")).convert("RGB")
        image.resize((16, 16)).save(path)
    return folder


def test_without_a_file_the_scores_are_those_of_the_runs_evaluation(trained, tmp_path):
    run, reported = trained
    assert predict_file(run, "--predictions_file", tmp_path / "own.jsonl") == pytest.approx(reported, rel=1e-6)
    assert "eval_top_5_accuracy" in reported
    found = read_jsonl(tmp_path / "own.jsonl")
    hits = [row["prediction"] == row["label"] for row in found]
    assert sum(hits) / len(hits) == pytest.approx(reported["eval_accuracy"])


def test_images_of_any_shape_are_predicted_as_by_the_pipeline(trained, tmp_path):
    """Below and above --decode_size; the exported image processor scales them to 19 pixels and crops 16."""
    from transformers import pipeline

    run, _ = trained
    rng, files = np.random.default_rng(0), []
    for number, size in enumerate([(8, 9), (16, 17), (19, 20), (18, 16), (13, 20), (40, 25), (57, 64), (300, 200)]):
        files.append(tmp_path / f"{number}.{'png' if number % 2 else 'jpg'}")
        small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
        small.resize(size, Image.Resampling.BICUBIC).save(files[-1])
    output = tmp_path / "out.jsonl"
    predict_file(run, tmp_path, "--predictions_file", output)
    classify = pipeline("image-classification", model=str(run / "model"), top_k=10)
    found = read_jsonl(output)
    for row, expected in zip(found, classify([str(file) for file in files]), strict=True):
        assert row["prediction"] == expected[0]["label"]
        for each in expected:
            assert row[f"probability_{each['label']}"] == pytest.approx(each["score"], abs=1e-5)


def test_classes_and_links_to_them_and_columns_of_paths_and_of_bytes_are_the_same(trained, digits, tmp_path, capsys):
    run, _ = trained
    files = sorted(digits.rglob("*.png"))
    names = [path.relative_to(digits).as_posix() for path in files]
    of_folder = predict_file(run, digits, "--predictions_file", tmp_path / "folder.csv")
    found = read_csv(tmp_path / "folder.csv")
    assert [row["file"] for row in found] == names
    assert [row["label"] for row in found] == [path.parent.name for path in files]
    assert of_folder["eval_accuracy"] == pytest.approx(sum(r["label"] == r["prediction"] for r in found) / 30)
    expected = [row["prediction"] for row in found]
    (tmp_path / "linked").mkdir()
    for place in (*digits.iterdir(), tmp_path / ".hidden"):
        (tmp_path / "linked" / place.name).symlink_to(place)
    predict_file(run, tmp_path / "linked", "--predictions_file", tmp_path / "linked.csv")
    assert (tmp_path / "linked.csv").read_bytes() == (tmp_path / "folder.csv").read_bytes()
    assert f"FILE {tmp_path / 'linked'}: passed over 1 hidden\n" in capsys.readouterr().err
    assert predict_file(run, digits / "3", "--predictions_file", tmp_path / "3.csv") == {}  # no subfolders, no labels
    assert [row["file"] for row in read_csv(tmp_path / "3.csv")] == sorted(path.name for path in digits.glob("3/*"))

    listed = write_csv(digits / "listed.csv", ("id", "path"), enumerate(names))
    flags = ["--image_column_name", "path", "--predictions_file"]
    predict_file(run, listed, *flags, tmp_path / "listed.csv")
    listed.unlink()
    found = [(row["path"], row["prediction"]) for row in read_csv(tmp_path / "listed.csv")]
    assert found == [*zip(names, expected, strict=True)]

    encoded = pa.array([{"bytes": path.read_bytes(), "path": None} for path in files])
    labels = [path.parent.name for path in files]
    pq.write_table(pa.table({"image": encoded, "label": labels, "id": names}), tmp_path / "bytes.parquet")
    scores = predict_file(run, tmp_path / "bytes.parquet", "--predictions_file", tmp_path / "bytes.csv")
    found = read_csv(tmp_path / "bytes.csv")
    assert [(row["id"], row["prediction"]) for row in found] == list(zip(names, expected, strict=True))
    assert "image" not in found[0]
    assert scores == pytest.approx(of_folder, rel=1e-5)


def test_corrupt_images_are_refused_or_left_out(trained, digits, tmp_path):
    run, _ = trained
    folder = shutil.copytree(digits, tmp_path / "images")
    broken = next((folder / "1").iterdir())
    broken.write_bytes(broken.read_bytes()[:-40])
    assert f"{broken} is corrupt" in refusal(predict_file, run, folder, "--predictions_file", tmp_path / "out.csv")
    scores = predict_file(run, folder, "--predictions_file", tmp_path / "out.csv", "--skip_corrupt_images")
    found = read_csv(tmp_path / "out.csv")
    assert len(found) == len(list(folder.rglob("*.png"))) - 1
    assert f"1/{broken.name}" not in [row["file"] for row in found]
    assert scores["eval_accuracy"] == pytest.approx(sum(r["label"] == r["prediction"] for r in found) / len(found))


def test_bad_input_is_one_line(trained, digits, tmp_path):
    run, _ = trained
    for name in ("empty", "latin 1", "new/cat", "new/1"):
        (tmp_path / name).mkdir(parents=True)
        if "new" in name:
            Image.new("RGB", (16, 16)).save(tmp_path / name / "a.png")
    shutil.copy(tmp_path / "new/1/a.png", tmp_path / "latin 1" / os.fsdecode(b"caf\xe9.png"))
    for words, expected in (
        ([tmp_path / "latin 1"], "latin 1: 'utf-8' codec can't encode character '\\udce9'"),
        ([tmp_path / "empty"], "empty has no image"),
        ([tmp_path / "new"], "a label in label that training does not have (unknown: cat"),
    ):
        assert expected in refusal(predict_file, run, *words, "--predictions_file", tmp_path / "out.csv")


OWN = """
import runpy

globals().update(runpy.run_path("{recipe}"))
build_classifier = build_model


def build_model(config, names):
    return build_classifier(config, ("score",))


def predict_batch(how, model, micro_batch, batch):
    logits = model(pixel_values=how.evaluation(batch)).logits
    return logits[:, 0], (logits[:, 0] - batch["labels"]) ** 2, logits
"""


def test_a_recipe_of_ones_own_predicts_the_numbers_of_images(tmp_path):
    recipe, folder = tmp_path / "prices.py", write_resnet(tmp_path / "model", 1, problem_type="regression")
    recipe.write_text(OWN.format(recipe=runs.ROOT / "recipes/image_classification.py"))
    greys = [Image.new("RGB", (16, 16), (grey, grey, grey)) for grey in range(0, 240, 4)]
    images = [{"bytes": encoded(grey), "path": None} for grey in greys]
    table = pa.table({"image": images, "price": [i / 10 for i in range(60)], "id": range(60)})
    pq.write_table(table, tmp_path / "prices.parquet")
    flags = ["--recipe", recipe, "--label_column_name", "price", "--predictions_file", tmp_path / "all.jsonl"]
    scores = predict_file(folder, tmp_path / "prices.parquet", *flags)
    found = read_jsonl(tmp_path / "all.jsonl")
    assert [row["id"] for row in found] == [*range(60)]
    assert len({row["prediction"] for row in found}) == 60
    assert scores["eval_loss"] == pytest.approx(np.mean([(row["prediction"] - row["price"]) ** 2 for row in found]))
