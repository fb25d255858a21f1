"""Flags, data, models, Hub names, folders and disks that a run cannot use cause a one-line error before the first step.

The functions that check data, labels, tokens, options and Hub names have their own tests. The tests here run a whole
recipe, to show that it calls these functions before the first step.
"""

import errno
import functools
import resource
import socket
import tempfile

import pytest
import runs
import torch
import toy_data
from huggingface_hub import constants
from runs import files, refusal, write_rows

from shared.checkpoints import saving
from shared.errors import UserError

REFUSED = {
    "nlp": [
        (["--max_tokens_per_micro_batch", 20], "--max_tokens_per_micro_batch 20 is smaller than sample "),
        (["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2], "--global_batch_size 12 is not 4"),
        (["--metric_for_best_model", "bleu"], "--metric_for_best_model bleu is not computed"),
        (["--metric_name", "pearson"], "--metric_name pearson does not fit classification"),
        (["--num_attention_heads", 3], "--hidden_size 32 is not a multiple of twice --num_attention_heads 3"),
        (["--model_type", "bert", "--pooling", "mean"], "--pooling mean: --model_type bert has a classifier without"),
    ],
    "mlm": [
        (["--metric_name", "accuracy"], "--metric_name accuracy: this recipe always computes"),
        (["--metric_for_best_model", "f1"], "--metric_for_best_model f1"),
        (["--mask_replace_prob", 0.95], "--mask_replace_prob 0.95 and --random_replace_prob 0.1"),
        (["--max_length", 2], "--max_length 2 leaves no room"),
        (["--text_column_name", "words"], "--text_column_name words: "),
        (["--decay_ratio", 0.3, "--lr_scheduler_type", "linear"], "--decay_ratio 0.3 has no effect"),
    ],
    "token_classification": [
        (["--max_length", 24, "--stride", 22], "--max_length 24 leaves room for 22 tokens of text"),
        (["--max_length", 2, "--stride", 0], "--max_length 2 leaves room for 0 tokens"),
        (["--csv_delimiter", ";"], "--csv_delimiter ; has no effect on --train_file"),
        (["--label_column_name", "ner"], "--label_column_name ner: --train_file "),
    ],
    "embeddings": [
        (["--global_batch_size", 1], "--global_batch_size 1: the loss compares the samples of a batch"),
        (["--global_batch_size", 500], "--global_batch_size 500: the loss compares the samples of a batch"),
        (["--prompts", "query: "], "--prompts 'query: ': give one for each of --text_column_names anchor positive"),
        (["--max_length", 32, 48, 48], "--max_length 32 48 48: give one for each of --text_column_names anchor"),
        (["--false_negative_margin", 3], "--false_negative_margin 3.0: must be between -2 and 2"),
        (["--static", "--pooling", "cls"], "--pooling cls: the embedding of a text by --static is the mean"),
        (["--matryoshka_dims", 64], "--matryoshka_dims 64: the embeddings have 32 dimensions"),
        (["--matryoshka_dims", 8, 8], "--matryoshka_dims 8 8: the embeddings have 32 dimensions: use different"),
        (["--text_column_names", "anchor", "answer"], "has no such column"),
        (["--corpus_file", "none.csv"], "--corpus_file none.csv"),
        (["--label_column_name", "score", "--corpus_file", "none.csv"], "--corpus_file none.csv exclude each"),
        (["--label_column_name", "likeness"], "--label_column_name likeness: --train_file "),
        (["--label_column_name", "negative"], "in negative: regression needs a number"),
        (["--label_column_name", "positive"], "use different columns"),
        (["--label_column_name", "score", "--symmetric"], "--label_column_name score and --symmetric True exclude"),
        (["--label_column_name", "score", "--false_negative_margin", 0], "--false_negative_margin 0.0 exclude each"),
        (
            ["--label_column_name", "score", "--text_column_names", "anchor", "positive", "negative"],
            "--text_column_names anchor positive negative: --label_column_name score has scores of pairs",
        ),
    ],
    "image_classification": [
        (["--validation_dir", "x"], "--validation_dir x has no effect without --train_dir"),
        (["--freeze_backbone"], "--freeze_backbone True has no effect without --model_name_or_path"),
        (["--depths", 1, 1, 1], "--depths and --hidden_sizes have different numbers of stages"),
        (["--sync_batchnorm"], "--sync_batchnorm needs a GPU"),
        (["--binary_cross_entropy", "--class_weights", "balanced"], "--class_weights are those of exclusive classes"),
        (["--dataset_name", "./none"], "no such folder"),
    ],
}
CASES = [(recipe, *case) for recipe, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("recipe", "flags", "expected"), CASES, ids=lambda part: str(part)[:40])
def test_flags_that_do_not_fit_are_refused(recipe, flags, expected, texts, tmp_path):
    train = functools.partial(runs.train, recipe)
    given = [*toy_data.tiny(recipe, texts, tmp_path), *flags]
    assert expected in refusal(train, tmp_path / "run", *given)
    assert not files(tmp_path / "run")


# Data


def test_data_that_cannot_be_learned_from_are_refused(train, tmp_path):
    good = write_rows(tmp_path / "good.csv", ("a text", "x"), ("another", "y"), ("a third", "x"), ("the last", "y"))
    one_class = write_rows(tmp_path / "one.csv", ("a text", "x"), ("another", "x"), ("a third", "x"))
    new_label = write_rows(tmp_path / "new.csv", ("a text", "x"), ("another", "z"))
    no_text = write_rows(tmp_path / "empty.csv", ("a text", "x"), ("", "y"))
    for training, validation, expected in (
        (tmp_path / "none.csv", good, f"--train_file {tmp_path / 'none.csv'}"),
        (one_class, good, f"--train_file {one_class} has fewer than two classes (x)"),
        (good, new_label, f"--validation_file {new_label} has a label in label that training does not have"),
        (no_text, good, f"--train_file {no_text}"),
    ):
        message = refusal(train, tmp_path / "run", "--train_file", training, "--validation_file", validation)
        assert expected in message
    assert not files(tmp_path / "run")


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


# The Hub


@pytest.fixture
def attempts(monkeypatch):
    """The addresses of attempted connections; each attempt fails, as without a network."""
    tried = []

    def fail(address, *_, **__):
        tried.append(address)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", fail)
    return tried


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [("--model_name_or_path", "train a new encoder"), ("--dataset_name", "train on the embedded docstrings")],
)
def test_a_hub_name_without_a_network_is_tried_once(texts, attempts, tmp_path, flag, way_out):
    data = [] if flag == "--dataset_name" else texts
    with pytest.raises(UserError, match=rf"{flag} nobody/nothing .*there is no network to .*: .*{way_out}"):
        runs.train("nlp", tmp_path, *data, flag, "nobody/nothing")
    assert len(attempts) == 1
    assert not files(tmp_path)


def test_an_upload_that_cannot_succeed_is_refused_before_training(train, attempts, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    message = refusal(train, tmp_path, "--push_to_hub")
    assert message.startswith("--push_to_hub: there is no network to ")
    assert len(attempts) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert refusal(train, tmp_path, "--push_to_hub").startswith("--push_to_hub requires a token: set HF_TOKEN")
    assert len(attempts) == 1
    assert not files(tmp_path)


# The output folder


def test_a_folder_that_cannot_be_written_is_refused(train, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file/run", "Not a directory")):
        assert refusal(train, output).startswith(f"--output_dir {output} cannot be written ({reason}): ")
    assert (tmp_path / "file").read_text() == "mine"

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert "cannot be written (No space left on device)" in refusal(train, tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "what"), [([], "checkpoints/step_00000008"), (["--checkpointing_steps", "no"], "model")]
)
def test_a_run_ends_with_a_one_line_error_if_the_disk_fills_up(train, tmp_path, monkeypatch, flags, what):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the weights take 138 kB
    try:
        message = refusal(train, tmp_path, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path / what} (" in message
    assert "ulimit -f" in message
    assert not list(tmp_path.glob("model*"))
    assert len(runs.training_lines(tmp_path)) == 4
