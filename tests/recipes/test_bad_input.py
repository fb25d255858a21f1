"""Bad data cause a one-line error before the first step.

The functions that check data, labels, tokens, options and Hub names have their own tests. The tests here run a whole
recipe, to show that it calls these functions before the first step.
"""

import csv
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
import runs
import torch
from refusals import files, refusal, rows

from shared.config import options

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


def test_data_that_cannot_be_learned_from_are_refused(train, tmp_path):
    good = rows(tmp_path / "good.csv", ("a text", "x"), ("another", "y"), ("a third", "x"), ("the last", "y"))
    one_class = rows(tmp_path / "one.csv", ("a text", "x"), ("another", "x"), ("a third", "x"))
    new_label = rows(tmp_path / "new.csv", ("a text", "x"), ("another", "z"))
    no_text = rows(tmp_path / "empty.csv", ("a text", "x"), ("", "y"))
    for training, validation, expected in (
        (tmp_path / "none.csv", good, f"--train_file {tmp_path / 'none.csv'}"),
        (one_class, good, f"--train_file {one_class} has fewer than two classes (x)"),
        (good, new_label, f"--validation_file {new_label} has a label in label that training does not have"),
        (no_text, good, f"--train_file {no_text}"),
    ):
        message = refusal(train, tmp_path / "run", "--train_file", training, "--validation_file", validation)
        assert expected in message
    assert not files(tmp_path / "run")


def test_every_label_format_and_file_format_gives_the_same_run(train, nlp, tmp_path, capsys):
    several = [["news"], ["news", "sport"], ["art"], [], ["sport"]] * 8
    texts = [f"text number {i} about {' and '.join(labels) or 'nothing'}" for i, labels in enumerate(several)]
    names = ["art", "news", "sport"]
    forms = {
        "lists": ([], {"label": several}),
        "delimited": (["--label_delimiter", ","], {"label": [",".join(labels) for labels in several]}),
        "columns": (
            ["--label_column_name", *names],
            {name: [int(name in labels) for labels in several] for name in names},
        ),
        "vectors": ([], {"label": [[int(name in labels) for name in names] for labels in several]}),
    }
    digests = {}
    for form, (flags, columns) in forms.items():
        table = pa.table({"text": texts, **columns})
        for suffix in ("csv", "tsv", "jsonl", "parquet"):
            path = tmp_path / f"{form}.{suffix}"
            if suffix == "parquet":
                pyarrow.parquet.write_table(table, path)
            elif suffix == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
            elif form in ("lists", "vectors"):
                continue  # CSV and TSV cannot hold these
            else:
                with path.open("w", newline="") as file:
                    lines = csv.writer(file, delimiter="," if suffix == "csv" else "\t")
                    lines.writerows([table.column_names, *(row.values() for row in table.to_pylist())])
            config = options.parse(nlp.Config, [*runs.TINY, "--train_file", str(path), *flags])
            data = nlp.load_data(config)
            assert data[2].names == (("0", "1", "2") if form == "vectors" else tuple(names))
            digests[form, suffix] = [part.digest() for part in data[:2]]
    assert len(digests) == 12
    assert len(set(map(str, digests.values()))) == 1
    train(
        tmp_path / "run", "--validation_file", None, "--train_file", path.with_name("columns.csv"), *forms["columns"][0]
    )
    assert "4 of its rows (10 % of each label, chosen by --seed 0) are held out" in capsys.readouterr().err
    settings = options.load(tmp_path / "run/config.yaml")
    assert settings["label_column_name"] == names
    assert json.loads((tmp_path / "run/model/config.json").read_text())["label2id"] == {"art": 0, "news": 1, "sport": 2}


def test_a_class_with_a_single_row_does_not_cause_an_error(train, tmp_path):
    lines = [(f"text number {i} of some", "ab"[i % 2]) for i in range(40)]
    data = rows(tmp_path / "data.csv", *lines, ("the only one", "rare"))
    for seed in (0, 1, 2):
        flags = ["--train_file", data, "--validation_file", None, "--validation_split_percentage", 70, "--seed", seed]
        train(tmp_path / f"run{seed}", *flags, "--dry_run")


def test_a_dataset_without_an_index_or_the_required_attributes_is_refused_before_training(
    train, nlp, monkeypatch, tmp_path
):
    import datasets

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from ()

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 9})
    load_data = nlp.load_data
    for data, expected in (
        (
            Stream(),
            "Stream can only be read sequentially, so a run on it could not be resumed exactly: store",
        ),
        (rows.to_iterable_dataset(), "IterableDataset can only be read sequentially"),
        (
            rows,
            "load_data returned a Dataset without lengths and digest: give it the attributes of TokenizedText",
        ),
    ):
        monkeypatch.setattr(nlp, "load_data", lambda config, data=data: (data, *load_data(config)[1:]))
        assert refusal(train, tmp_path).startswith(expected)
    assert not files(tmp_path)
