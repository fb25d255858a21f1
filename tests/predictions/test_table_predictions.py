"""`python -m shared.predict` for a recipe on a table of numbers: the example with the functions that the docs show."""

import re

import numpy as np
import pytest
import runs
from predicting import predict_file, read_csv, write_csv
from runs import refusal
from sklearn.datasets import load_diabetes

from shared import predict

OWN = {  # lines of `main`, and what replaces them
    r"torch.manual_seed.*?hidden_size, 1\)\)": "model = build_model(config)",
    r" +def losses_of.*?square\(\)\n\n": "",
}


def predicting():
    """The code of the example, with the functions that docs/predictions.md shows in place of its own lines."""
    code = (runs.ROOT / "docs/examples/diabetes.py").read_text()
    shown = (runs.ROOT / "docs/predictions.md").read_text().split("```python\n")[1].split("```")[0]
    own = [re.search(part, code, re.DOTALL).group() for part in (r"def load_data.*?(?=\ndef main)", *OWN)]
    for old, new in zip(own, (shown, *OWN.values()), strict=True):
        code = code.replace(old, new)
    return code.replace("losses_of", "predict_batch").replace("import torch\n", "import numpy as np\nimport torch\n", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of a short run, and its last evaluation."""
    folder = tmp_path_factory.mktemp("diabetes")
    (folder / "predicting.py").write_text(predicting())
    return folder / "run", runs.train(runs.load(folder / "predicting.py"), folder / "run", "--seed", 1)


@pytest.fixture(scope="module")
def rows():
    """The validation rows, as numbers by the names of the columns."""
    found = load_diabetes()
    columns = dict(zip(found.feature_names, found.data[:88].T, strict=True)) | {"progression": found.target[:88]}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write(file, rows):
    return write_csv(file, [*rows[0]], [row.values() for row in rows])


def test_a_table_is_predicted_and_scored_as_by_the_run(trained, rows, tmp_path):
    run, reported = trained
    scores = predict_file(run, "--predictions_file", tmp_path / "own.csv")
    assert scores == {"eval_loss": pytest.approx(reported["eval_loss"], rel=1e-6)}
    assert [row["row"] for row in read_csv(tmp_path / "own.csv")] == [str(number) for number in range(1, 89)]
    assert predict_file(run, write(tmp_path / "new.csv", rows)) == pytest.approx(scores)
    found = read_csv(run / "predictions/new.csv")
    assert [row["prediction"] for row in found] == [row["prediction"] for row in read_csv(tmp_path / "own.csv")]
    assert [row["age"] for row in found] == [str(row["age"]) for row in rows]
    (run / "model/config.json").write_text("{}")  # of a model of transformers, which may need the data of the run
    assert predict.parse_request([str(run), "new.csv"]).config.seed == 1
    (run / "model/config.json").unlink()
    [batch] = predict.parse_request([str(run)]).batches([3, 1, 2])  # a data set may have a list of lengths
    assert batch.samples.tolist() == [0, 2, 1]


def test_rows_without_a_target_are_predicted_and_not_scored(trained, rows, tmp_path):
    run, _ = trained
    without = [{name: row[name] for name in row if name != "progression"} for row in rows]
    assert predict_file(run, write(tmp_path / "none.csv", without)) == {}
    some = [row | ({"progression": ""} if number % 2 else {}) for number, row in enumerate(rows)]
    scores = predict_file(run, write(tmp_path / "some.csv", some))
    none, found = ([float(r["prediction"]) for r in read_csv(run / f"predictions/{n}.csv")] for n in ("none", "some"))
    assert none == found
    errors = [((p - row["progression"]) / 77) ** 2 for p, row in zip(found, rows, strict=True)]  # in the units of rows
    assert scores["eval_loss"] == pytest.approx(np.mean(errors[::2]), rel=1e-5)
    assert predict_file(run, tmp_path / "some.csv", "--no_scores", "--predictions_file", tmp_path / "no.csv") == {}


def test_bad_tables_and_recipes_that_cannot_predict_are_one_line(trained, rows, tmp_path):
    run, _ = trained
    for name, change, expected in (
        ("lacks", lambda row: row.pop("bmi"), "s1, s2, s3, s4, s5, s6, progression): 'bmi'"),
        ("text", lambda row: row.update(bmi="heavy"), "text.csv"),
        ("gap", lambda row: row.update(bmi=""), "the prediction for row 1 of FILE"),
    ):
        changed = [dict(row) for row in rows]
        for row in changed[:1] if name == "gap" else changed:
            change(row)
        assert expected in refusal(predict_file, run, write(tmp_path / f"{name}.csv", changed)), name
    for change, expected in (
        (("def encode(", "def encoded("), "no function encode as predictions of this kind (table) need it"),
        (("(model: Any, _:", "(scale: Any, model: Any, _:"), "missing a required argument: 'batch'"),
        (("return predictions *", "return batch[0] *"), "gives [64, 10], [64] for a batch, not [64, 1], [64, 1]"),
        (("return predictions *", "return predictions[None] *"), "gives [1, 64], [64] for a batch, not [64, 1]"),
        (("n InMemory(t", "n type('', (InMemory,), {'__getitem__': lambda *_: None})(t"), "py cannot become a batch"),
    ):
        (tmp_path / "changed.py").write_text(predicting().replace(*change))
        file = write(tmp_path / "rows.csv", rows)
        assert expected in refusal(predict_file, run, file, "--recipe", tmp_path / "changed.py")
