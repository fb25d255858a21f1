"""`python -m shared.export`: the ONNX file computes what transformers computes, and appears checked or not at all."""

import shutil
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from predicting import predict_file, read_csv, write_bert, write_csv, write_jsonl, write_resnet
from runs import refusal
from torch.nn import functional as F

from shared import export
from shared.predictions.onnx import Graph, OnnxModel


def export_model(*words):
    """The figures of `python -m shared.export` with these words."""
    return export.export(export.parse_export([str(word) for word in words]))


def random_texts(vocabulary, **more):
    """Token ids and attention mask [5, 29], unlike those with which a model is exported; some rows have padding."""
    mask = (torch.arange(29) < torch.tensor([29, 3, 17, 28, 1])[:, None]).long()
    ids = torch.randint(5, vocabulary, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask, **{name: values * mask for name, values in more.items()}}


def computed(folder, batch):
    """The outputs of the ONNX file of a model for a batch, computed by onnxruntime."""
    return OnnxModel(folder / "onnx/model.onnx")(**batch).logits


def pairs(alone, rows, tmp_path, labels=("0", "1", "2"), **head):
    folder, model = write_bert(tmp_path / "model", alone, "BertForSequenceClassification", **head or {"num_labels": 3})
    given = [(row["text"], row["text"][::-1], labels[i % 3]) for i, row in enumerate(rows)]
    file = write_csv(tmp_path / "pairs.csv", ("a", "b", "label"), given)
    batch = random_texts(model.config.vocab_size, token_type_ids=(torch.arange(29) > 10).long())
    flags = ["--text_column_names", "a", "b", "--label_column_name", "label", "--max_length", 32]
    return [folder, file, *flags], batch, model(**batch).logits


def tags(alone, rows, tmp_path):
    names = {"id2label": {0: "O", 1: "B-A", 2: "I-A"}, "label2id": {"O": 0, "B-A": 1, "I-A": 2}}
    folder, model = write_bert(tmp_path / "model", alone, "BertForTokenClassification", **names)
    words = [row["text"].split() for row in rows]
    file = write_jsonl(tmp_path / "words.jsonl", [{"tokens": each, "tags": ["O"] * len(each)} for each in words])
    batch = random_texts(model.config.vocab_size)
    return [folder, file, "--max_length", 24, "--stride", 6], batch, model(**batch).logits


def embeddings(alone, rows, tmp_path):
    folder, model = write_bert(tmp_path / "model", alone, "BertModel")
    file = write_jsonl(tmp_path / "texts.jsonl", [{"anchor": row["text"]} for row in rows])
    batch = random_texts(model.config.vocab_size)
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return [folder, file], batch, F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def images(_, __, tmp_path):
    from transformers import AutoModelForImageClassification

    folder = write_resnet(tmp_path / "model", 3)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    (tmp_path / "images").mkdir()
    for number in range(7):
        noise = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"images/{number}.png")
    batch = {"pixel_values": torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    return [folder, tmp_path / "images"], batch, model(**batch).logits


numbers = partial(pairs, labels=("0.5", "-1", "2"), num_labels=1, problem_type="regression")


@pytest.mark.parametrize("kind", [pairs, numbers, tags, embeddings, images])
def test_the_file_computes_the_same_in_another_shape_and_so_do_predictions_with_it(alone, rows, tmp_path, kind):
    words, batch, expected = kind(alone, rows, tmp_path)
    figures = export_model(*words)
    if kind in (pairs, numbers, tags):
        assert figures["eval_loss"]["ONNX"] == pytest.approx(figures["eval_loss"]["PyTorch"], rel=1e-5)
    else:  # without labels
        assert not any(name.startswith("eval_") for name in figures)
    real = batch["attention_mask"].bool() if kind is tags else ...
    torch.testing.assert_close(computed(words[0], batch)[real], expected[real], rtol=1e-4, atol=1e-4)

    files = {runtime: tmp_path / f"{runtime}.parquet" for runtime in ("None", "onnx")}
    scores = [predict_file(*words, "--runtime", it, "--predictions_file", files[it]) for it in files]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)
    found = [pq.read_table(file) for file in files.values()]
    for columns in zip(*(table.columns for table in found), strict=True):
        flat = (pc.list_flatten(each) if pa.types.is_nested(each.type) else each for each in columns)
        torchs, onnxs = (each.to_pylist() for each in flat)
        assert onnxs == (pytest.approx(torchs, abs=1e-4) if isinstance(torchs[0], float) else torchs)
    if kind is tags:
        assert {tag for row in found[0]["prediction"].to_pylist() for tag in row} > {"O"}
    if kind is pairs:
        message = refusal(computed, words[0], random_texts(300))
        assert "model.onnx: Required inputs (['token_type_ids']) are missing" in message
    if kind is embeddings:
        message = refusal(predict_file, *words, "--runtime", "onnx", "--pooling", "cls")
        assert message.startswith("--pooling has no effect on a model in the ONNX format")


def test_int8_predicts_nine_of_ten_labels_as_float32_and_predictions_by_pytorch_remain(alone, texts, tmp_path):
    run, output = shutil.copytree(alone, tmp_path / "run"), tmp_path / "run/predictions/validation.csv"
    (run / "model/README.md").write_text("# mine\n\n## ONNX\n\nof an earlier export\n\n## Notes\n\nkept\n")
    scores = predict_file(run, texts[3], "--predictions_file", output)
    figures = export_model(run / "model", "--int8")
    size, loss = figures["size, MB"], figures["eval_loss"]
    assert size["ONNX, int8"] < 0.8 * size["ONNX"]
    assert loss["ONNX"] == pytest.approx(loss["PyTorch"], rel=1e-5)
    assert loss["PyTorch"] == pytest.approx(scores["eval_loss"], rel=1e-5)
    assert loss["ONNX, int8"] == pytest.approx(loss["PyTorch"], rel=0.1)
    assert [path.name for path in (run / "model/onnx").iterdir()] == ["model.onnx"]
    card = (run / "model/README.md").read_text()
    assert card.startswith("# mine\n\n## Notes\n\nkept\n\n## ONNX\n\n`onnx/model.onnx` is the ONNX, int8 model")
    assert "of an earlier export" not in card
    assert "37 samples of the validation data" in card

    quantized = tmp_path / "int8.csv"
    predict_file(run, texts[3], "--runtime", "onnx", "--predictions_file", quantized)
    labels = [[row["prediction"] for row in read_csv(path)] for path in (output, quantized)]
    assert np.mean([a == b for a, b in zip(*labels, strict=True)]) >= 0.9
    flags = ["--runtime", "onnx", "--predictions_file", output]
    assert "differs in model, input, settings)" in refusal(predict_file, run, texts[3], *flags)
    assert "exists: remove it" in refusal(export_model, run)


def test_a_file_that_computes_something_else_or_cannot_be_computed_is_not_written(alone, tmp_path, monkeypatch):
    run = shutil.copytree(alone, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    forward = OnnxModel.forward

    def nearly(self, **batch):
        assert export.folder_lock.holder_of(run / "model/.lock")
        output = forward(self, **batch)
        output.logits[-1, -1] *= 1.01
        return output

    def depends_on_values(self, ids, mask):
        return self.model(ids, mask).logits if ids.sum() > 9 else None

    for kind, changed, expected in (
        (OnnxModel, nearly, "onnxruntime computes other logits than PyTorch"),
        (Graph, depends_on_values, "ONNX cannot express a ModernBertForSequenceClassification ("),
    ):
        monkeypatch.setattr(kind, "forward", changed)
        assert refusal(export_model, run).startswith(expected)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_is_missing_is_named(alone, texts, tmp_path, monkeypatch):
    run = shutil.copytree(alone, tmp_path / "run")
    message = refusal(predict_file, run, texts[3], "--runtime", "onnx")
    assert "model.onnx (python -m shared.export writes it): [ONNXRuntimeError] : 3 : NO_SUCHFILE : Load" in message
    assert refusal(export_model, run, "--torch_compile").startswith("--torch_compile has no effect")
    assert "at most one file, then the flags: OUTPUT_DIR [FILE]" in refusal(export_model)
    assert "give a FILE" in refusal(export_model, shutil.copytree(run / "model", tmp_path / "bare"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert refusal(export_model, run).startswith("ONNX needs pip install onnx onnxscript onnxruntime: ")
    (run / "model/config.json").unlink()
    assert "only models of transformers can be exported" in refusal(export_model, run)
