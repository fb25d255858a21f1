"""`python -m shared.predict` for texts: equal to transformers' pipeline and to the run, resumable, in any format."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from one_text_at_a_time import logits_of
from predicting import predict_file, read_csv, read_jsonl, write_bert, write_csv, write_jsonl
from runs import refusal
from sklearn.metrics import f1_score

from shared import predict
from shared.datasets.labels import Labels
from shared.predictions import parts
from shared.predictions.labels import as_in_table

MANY_PARTS = ["--max_tokens_per_micro_batch", 96]  # few texts in each forward pass
TWINS = """{"architectures": ["BertForSequenceClassification"], "model_type": "bert", "max_position_embeddings": 9,
    "id2label": {"0": "a", "1": "a"}}"""


def test_the_predictions_are_those_of_the_pipeline_in_the_order_of_the_input(alone, rows, tmp_path):
    from transformers import pipeline

    # A column that the model does not use keeps its spelling, and all line ends.
    given = [(f"0{number}\r", row["text"]) for number, row in enumerate(rows)]
    file, output = write_csv(tmp_path / "new.csv", ("id", "text"), given), tmp_path / "out.csv"
    assert predict_file(alone, file, "--predictions_file", output, *MANY_PARTS) == {}  # no labels, so no scores

    found = read_csv(output)
    assert [(row["id"], row["text"]) for row in found] == given
    classify = pipeline("text-classification", model=str(alone / "model"), top_k=None)
    expected_of = classify([row["text"] for row in rows], truncation=True, max_length=48)
    for row, expected in zip(found, expected_of, strict=True):
        assert row["prediction"] == expected[0]["label"]
        for each in expected:
            assert float(row[f"probability_{each['label']}"]) == pytest.approx(each["score"], abs=1e-6)


def test_a_killed_prediction_resumes_on_two_processes_and_its_bytes_are_the_same(alone, texts, tmp_path, monkeypatch):
    flags = [*MANY_PARTS, "--predictions_file"]
    whole, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"
    scores = predict_file(alone, texts[3], *flags, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.csv", "whole.csv.json"]

    write = parts.write_part

    def write_five(file, outputs):
        if file.name.startswith("part_0005"):
            raise KeyboardInterrupt
        write(file, outputs)

    monkeypatch.setattr(parts, "write_part", write_five)
    with pytest.raises(KeyboardInterrupt):
        predict_file(alone, texts[3], *flags, resumed)
    monkeypatch.undo()
    left = sorted((tmp_path / "resumed.csv.parts").glob("part_*"))
    assert [path.name[:9] for path in left] == [f"part_{part:04d}" for part in range(5)]
    assert not resumed.exists()

    codes, output = runs.run_forked(2, "shared/predict.py", [alone, texts[3], *flags, resumed], tmp_path)
    assert codes == [0, 0], output
    assert "of which 5 are computed already" in output
    assert resumed.read_bytes() == whole.read_bytes()
    records = [json.loads((tmp_path / f"{name}.csv.json").read_text()) for name in ("whole", "resumed")]
    assert records[0] == records[1]
    assert (records[0]["scores"], records[0]["rows"]) == (scores, 37)
    assert not (tmp_path / "resumed.csv.parts").exists()


def test_a_finished_prediction_is_not_computed_again(alone, texts, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.csv"
    scores = predict_file(alone, texts[3], "--predictions_file", output)
    monkeypatch.setattr(parts, "compute", lambda *_: pytest.fail("computed again"))
    (tmp_path / "out.csv.parts").mkdir()  # as after a kill while the parts are removed
    assert predict_file(alone, texts[3], "--predictions_file", output) == scores
    assert not (tmp_path / "out.csv.parts").exists()
    assert "holds these predictions already" in capsys.readouterr().out
    assert "differs in input)" in refusal(predict_file, alone, texts[1], "--predictions_file", output)
    flags = ["--predictions_file", output, "--max_length", 20]
    assert "differs in input, settings)" in refusal(predict_file, alone, texts[3], *flags)
    output.write_text("mine")
    assert "differs in bytes)" in refusal(predict_file, alone, texts[3], "--predictions_file", output)
    assert output.read_text() == "mine"


def test_after_a_change_of_the_input_no_part_is_read_again(alone, rows, tmp_path, monkeypatch, capsys):
    file, output = tmp_path / "new.jsonl", tmp_path / "out.jsonl"
    write_jsonl(file, [row | {"__row__": 1} for row in rows])
    monkeypatch.setattr(parts, "finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        predict_file(alone, file, "--predictions_file", output, *MANY_PARTS)
    monkeypatch.undo()
    write_jsonl(file, [row | {"__row__": 2} for row in rows])  # the same texts
    predict_file(alone, file, "--predictions_file", output, *MANY_PARTS)
    assert "computed already" not in capsys.readouterr().out
    assert [row["__row__"] for row in read_jsonl(output)] == [2] * len(rows)


def test_an_input_that_vanishes_is_no_error_of_the_output(alone, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(parts.Prediction, "compute", lambda *_: (tmp_path / "gone").stat())
    with pytest.raises(FileNotFoundError, match="gone"):
        predict_file(alone, texts[3], "--predictions_file", tmp_path / "out.csv")


def test_rows_without_a_label_are_predicted_and_not_scored(alone, rows, tmp_path, capsys):
    labeled = [row | ({"label": None} if number % 3 else {}) for number, row in enumerate(rows)]
    file = tmp_path / "new.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in labeled).encode()))
    scores = predict_file(alone, file, "--predictions_file", tmp_path / "out.jsonl")
    assert "24 of 37 rows have no label" in capsys.readouterr().err
    found = read_jsonl(tmp_path / "out.jsonl")
    hits = [row["prediction"] == row["label"] for row in found if row["label"] is not None]
    assert scores["eval_accuracy"] == pytest.approx(np.mean(hits))


def test_several_labels_are_a_list_or_joined_text_and_scored(alone, rows, tmp_path):
    names = ["the", "of", "test"]
    config = {"problem_type": "multi_label_classification", "id2label": dict(enumerate(names))}
    folder, _ = write_bert(tmp_path / "model", alone, "BertForSequenceClassification", **config)
    labels = [[name for name in names if name in row["text"].lower()] for row in rows]
    pq.write_table(pa.table({"body": [row["text"] for row in rows], "tags": labels}), tmp_path / "new.parquet")
    flags = ["--text_column_names", "body", "--label_column_name", "tags", "--max_length", 48]
    scores = predict_file(folder, tmp_path / "new.parquet", *flags)
    found = pq.read_table(folder / "predictions/new.parquet").to_pylist()

    logits = logits_of(folder, [row["text"] for row in rows]).numpy()
    true = np.array([[name in row for name in names] for row in labels])
    assert 0 < (logits > 0).mean() < 1
    predicted = [[name for name, logit in zip(names, row, strict=True) if logit > 0] for row in logits]
    assert [row["prediction"] for row in found] == predicted
    shares = np.array([[row[f"probability_{name}"] for name in names] for row in found])
    assert shares == pytest.approx(1 / (1 + np.exp(-logits)), abs=1e-6)
    assert scores["eval_micro_f1"] == pytest.approx(f1_score(true, logits > 0, average="micro"))

    joined = [(row["text"], "|".join(tags)) for row, tags in zip(rows, labels, strict=True)]
    write_csv(tmp_path / "new.csv", ("body", "tags"), joined)
    assert predict_file(folder, tmp_path / "new.csv", *flags, "--label_delimiter", "|") == pytest.approx(scores)
    of_csv = [row["prediction"] for row in read_csv(folder / "predictions/new.csv")]
    assert of_csv == ["|".join(row["prediction"]) for row in found]


@pytest.mark.parametrize("of", [pa.list_, pa.large_list, lambda number: pa.list_(number, 2)])
def test_lists_of_0_and_1_are_recognized_in_lists_of_any_kind(of):
    table = pa.table({"tags": pa.array([[0, 1], [1, 0]], of(pa.int64()))})
    assert as_in_table(Labels("multi_label", ("tags",), ("0", "1")), table).vectors


def test_the_numbers_of_a_regression_of_pairs_are_in_the_units_of_the_column(alone, rows, texts, tmp_path):
    pairs = [{"first": row["text"][:40], "second": row["text"][20:], "label": 500.0 + len(row["text"])} for row in rows]
    file, output = write_jsonl(tmp_path / "pairs.jsonl", pairs), tmp_path / "run"
    flags = [*runs.TINY, "--max_train_steps", 2, "--eval_steps", 2, "--train_file", file, "--validation_file", file]
    reported = runs.train("nlp", output, *flags, "--text_column_names", "first", "second")
    assert predict_file(output, file) == pytest.approx(reported, rel=1e-4)
    found = read_jsonl(output / "predictions/pairs.jsonl")
    assert [set(row) for row in found] == [{"first", "second", "label", "prediction"}] * len(rows)
    logits = logits_of(output / "model", *([row[name] for row in pairs] for name in ("first", "second")))
    assert [row["prediction"] for row in found] == pytest.approx(logits[:, 0].tolist(), rel=1e-5)
    assert 300 < found[0]["prediction"] < 900


def test_a_model_without_names_of_labels_is_scored_by_their_numbers(alone, rows, tmp_path, capsys):
    folder, _ = write_bert(tmp_path / "model", alone, "BertForSequenceClassification", num_labels=3)
    file = write_csv(tmp_path / "new.csv", ("text", "label"), [(row["text"], i % 3) for i, row in enumerate(rows)])
    file.write_text(f"{file.read_text()}without a label,NA\n")
    scores = predict_file(folder, file, "--max_length", 48)
    expected = logits_of(folder, [row["text"] for row in rows]).numpy().argmax(1)
    assert scores["eval_accuracy"] == pytest.approx(np.mean(expected == np.arange(len(rows)) % 3))
    assert "0 is LABEL_0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def inputs(alone, texts, tmp_path_factory):
    """Files and folders that cannot be predicted."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "taken.csv").write_text("mine")
    (folder / "collides.csv").write_text("text,prediction\na text,b\n")
    (folder / "labels.csv").write_text("text,label\na text,unheard\n")
    pq.write_table(pa.table({"text": ["a text"], "more": [[b"bytes"]]}), folder / "bytes.parquet")
    (folder / "lists.jsonl").write_text('{"text": "a text", "more": [1, 2]}\n')
    (folder / "spans.py").write_text("from recipes.mlm import Config\nbuild_model = predict_batch = None")
    for name, file, content in (
        ("unfinished", "config.yaml", (alone / "config.yaml").read_text()),
        ("mlm", "config.json", '{"architectures": ["BertForMaskedLM"], "model_type": "bert"}'),
        ("bare", "config.json", '{"architectures": ["BertModel"], "model_type": "bert"}'),
        ("twins", "config.json", TWINS),
    ):
        (folder / name).mkdir()
        (folder / name / file).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing_run", "labels.csv"], "missing_run has no config.json and no model.safetensors: give the folder"),
        (["unfinished", "labels.csv"], "unfinished/model has no config.json"),
        (["mlm", "labels.csv"], "mlm.py has no function predict_batch"),
        (["bare", "labels.csv"], "is a BertModel, which no recipe of this project trains"),
        (["RUN", "missing_file.csv"], "missing_file.csv: no such file"),
        (["RUN", "labels.csv", "--text_column_names", "body"], "--text_column_names body: FILE"),
        (["RUN", "labels.csv", "--label_column_name", "stars"], "--label_column_name stars: FILE"),
        (["RUN", "labels.csv", "--label_column_name", "a", "b"], "a b: the labels of the model are asyncio, "),
        (["RUN", "collides.csv"], "has a column prediction, as the predictions have"),
        (["RUN", "labels.csv"], "unheard; known: asyncio"),
        (["RUN", "lists.jsonl", "--predictions_file", "new.csv"], "csv cannot hold the column more"),
        (["RUN", "bytes.parquet", "--predictions_file", "new.jsonl"], "jsonl cannot hold the column more"),
        (["RUN", "labels.csv", "--no_scores", "--predictions_file", "taken.csv"], "exists with other content"),
        (["RUN", "labels.csv", "--predictions_file", "new.txt"], "must end in .csv, .jsonl, .parquet"),
        (["RUN", "labels.csv", "--image_column_name", "x"], "unknown flag --image_column_name"),
        (["RUN", "*.csv"], "name the output with --predictions_file"),
        (["MODEL"], "is not the folder of a run"),
        (["RUN", "labels.csv", "--recipe", "spans.py"], "spans.py reads tags, and its Config has no label_column_name"),
        (["RUN", "labels.csv", "--recipe"], "--recipe has no value"),
        (["twins", "labels.csv"], "config.json: two labels have the name a: rename one"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(alone, inputs, words, expected, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # of the recipe that it imports
    places = {"RUN": alone, "MODEL": alone / "model"}
    before = runs.files(alone) | runs.files(inputs)
    given = [places.get(word) or (inputs / word if "." in word or not n else word) for n, word in enumerate(words)]
    assert expected in refusal(predict_file, *given)
    assert runs.files(alone) | runs.files(inputs) == before


def test_rows_without_text_can_be_left_out_and_unknown_labels_ignored(alone, tmp_path, capsys):
    file = tmp_path / "new.csv"
    file.write_text("text,label\nan event loop,unheard\n,email\na message with headers,email\n")
    flags = ["--skip_incomplete_rows", "--no_scores", "--predictions_file", tmp_path / "out.csv"]
    assert predict_file(alone, file, *flags) == {}
    found = [(row["text"], row["label"]) for row in read_csv(tmp_path / "out.csv")]
    assert found == [("an event loop", "unheard"), ("a message with headers", "email")]
    assert "1 of 3 rows" in capsys.readouterr().err


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit, match="0"):
        predict.parse_request(["--help"])
    assert "--predictions_file" in capsys.readouterr().out.replace("-file", "_file")
