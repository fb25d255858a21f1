"""Bad data and models cause a one-line error before the first step.

The functions that check data, labels, tokens, options and Hub names have their own tests. The tests here run a whole
recipe, to show that it calls these functions before the first step.
"""

import pytest
import runs
import torch
from refusals import files, rows
from runs import refusal

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
        (Stream(), "Stream can only be read sequentially"),
        (rows.to_iterable_dataset(), "IterableDataset can only be read sequentially"),
        (rows, "load_data returned a Dataset without lengths and digest"),
    ):
        monkeypatch.setattr(nlp, "load_data", lambda config, data=data: (data, *load_data(config)[1:]))
        assert refusal(train, tmp_path).startswith(expected)
    assert not files(tmp_path)


# Models


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing", "has no config.json: use a folder that save_pretrained wrote"),
        ("empty", "has no config.json: use a folder that save_pretrained wrote"),
        ("images", "cannot be loaded by AutoTokenizer: "),
        ("images with tokenizer", "by AutoModelForSequenceClassification: Unrecognized configuration class"),
        ("without weights", "by AutoModelForSequenceClassification: Error no file named model.safetensors"),
        ("cut off", "cannot be loaded by AutoModelForSequenceClassification"),
    ],
)
def test_a_folder_without_a_text_classifier_is_refused(train, models, tmp_path, name, expected):
    message = refusal(train, tmp_path / "run", "--model_name_or_path", models / name)
    assert message.startswith(f"--model_name_or_path {models / name}")
    assert expected in message
    assert not files(tmp_path / "run")


def test_a_model_that_does_not_fit_the_texts_is_refused(train, models, tmp_path):
    message = refusal(train, tmp_path, "--model_name_or_path", models / "other tokenizer")
    assert message.startswith("--model_name_or_path: the tokenizer has ids up to 401, but the model has only 400")
    message = refusal(train, tmp_path, "--model_name_or_path", models / "good", "--max_length", 49)
    assert message.startswith("--max_length 49 exceeds the model's 48 positions")


def test_parameters_that_do_not_affect_the_loss_are_frozen_and_listed_and_the_run_resumes(
    train, nlp, monkeypatch, tmp_path, capsys
):
    build_model = nlp.build_model

    class WithUnusedLayer(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.forgotten = model, torch.nn.Linear(2, 2)

        def forward(self, **batch):
            return self.model(**batch)

    def build_with_an_added_layer(*args):
        model = build_model(*args)
        model.added = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(nlp, "build_model", build_with_an_added_layer)
    message = refusal(train, tmp_path / "refused")
    assert "has added.bias (2 weights differ) could be exported, but from_pretrained would not load it" in message
    monkeypatch.setattr(nlp, "build_model", lambda *args: WithUnusedLayer(build_model(*args)))
    flags = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path / "whole", *flags, 4)
    expected = "frozen, because the loss does not depend on them: forgotten.weight, forgotten.bias\n"
    assert expected in capsys.readouterr().out
    train(tmp_path / "resumed", *flags, 2)
    train(tmp_path / "resumed", *flags, 4)
    assert torch.equal(runs.weights(tmp_path / "whole"), runs.weights(tmp_path / "resumed"))
