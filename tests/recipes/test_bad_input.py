"""Flags, data, models, Hub names, folders and disks that a run cannot use cause a one-line error before the first step.

The functions that check data, labels, tokens, options and Hub names have their own tests. The tests here run a whole
recipe, to show that it calls these functions before the first step.
"""

import errno
import functools
import socket
from unittest import mock

import pytest
import runs
import torch
import toy_data
from huggingface_hub import constants
from runs import files, refusal

REFUSED = {
    "nlp": [
        (["--train_file", "none.csv"], "--train_file none.csv: no such file"),
        (["--max_tokens_per_micro_batch", 20], "--max_tokens_per_micro_batch 20 is smaller than sample "),
        (["--metric_for_best_model", "bleu"], "--metric_for_best_model bleu is not computed"),
        (["--num_attention_heads", 3], "--hidden_size 32 is not a multiple of twice --num_attention_heads 3"),
        (["--model_type", "bert", "--pooling", "mean"], "--pooling mean: --model_type bert has a classifier without"),
    ],
    "mlm": [
        (["--metric_name", "accuracy"], "unknown flag --metric_name"),
        (["--mask_replace_prob", 0.95], "--mask_replace_prob 0.95 and --random_replace_prob 0.1"),
        (["--max_length", 2], "--max_length 2 leaves no room"),
        (["--text_column_name", "words"], "--text_column_name words: "),
        (["--decay_ratio", 0.3, "--lr_scheduler_type", "linear"], "--decay_ratio 0.3 has no effect"),
    ],
    "token_classification": [
        (["--max_length", 24, "--stride", 22], "--max_length 24 leaves room for 22 tokens of text"),
    ],
    "embeddings": [
        (["--global_batch_size", 1], "--global_batch_size 1: the loss compares the samples of a batch"),
        (["--prompts", "query: "], "--prompts 'query: ': give one for each of --text_column_names anchor positive"),
        (["--false_negative_margin", 3], "--false_negative_margin 3.0: must be at least -2 and at most 2"),
        (["--static", "--pooling", "cls"], "--pooling cls: the embedding of a text by --static is the mean"),
        (["--label_column_name", "score", "--corpus_file", "none.csv"], "--corpus_file none.csv exclude each"),
        (["--label_column_name", "negative"], "in negative: regression needs a number"),
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
    ],
}
CASES = [(recipe, *case) for recipe, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("recipe", "flags", "expected"), CASES, ids=lambda part: str(part)[:40])
def test_flags_that_do_not_fit_are_refused(recipe, flags, expected, texts, tmp_path):
    train = functools.partial(runs.train, recipe)
    assert expected in refusal(train, tmp_path / "run", *toy_data.tiny(recipe, texts, tmp_path), *flags)
    assert not files(tmp_path / "run")


def test_a_folder_without_a_text_classifier_is_refused(train, models, tmp_path):
    for name, expected in (
        ("empty", "has no config.json: use a folder that save_pretrained wrote"),
        ("images", "cannot be loaded by AutoTokenizer: "),
        ("cut off", "cannot be loaded by AutoModelForSequenceClassification"),
    ):
        message = refusal(train, tmp_path / "run", "--model_name_or_path", models / name)
        assert message.startswith(f"--model_name_or_path {models / name}")
        assert expected in message
    message = refusal(train, tmp_path / "run", "--model_name_or_path", models / "other tokenizer")
    assert message.startswith("--model_name_or_path: the tokenizer has ids up to 401, but the model has only 400")
    message = refusal(train, tmp_path / "run", "--model_name_or_path", models / "good", "--max_length", 49)
    assert message.startswith("--max_length 49 exceeds the model's 48 positions")
    assert not files(tmp_path / "run")


def test_a_model_of_which_from_pretrained_would_not_load_a_weight_is_refused(train, nlp, monkeypatch, tmp_path):
    build_model = nlp.build_model

    def build_with_an_added_layer(*args):
        model = build_model(*args)
        model.added = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(nlp, "build_model", build_with_an_added_layer)
    message = refusal(train, tmp_path)
    assert "with the weights that are trained (2 unexpected (added.bias)): build_model must return" in message


def test_an_upload_that_cannot_succeed_is_refused_before_training(train, monkeypatch, tmp_path):
    connect = mock.Mock(side_effect=OSError(errno.ENETUNREACH, "Network is unreachable"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    assert refusal(train, tmp_path, "--push_to_hub").startswith("--push_to_hub: there is no network to ")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert refusal(train, tmp_path, "--push_to_hub").startswith("--push_to_hub requires a token: set HF_TOKEN")
    assert connect.call_count == 1
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(train, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    for name, why in (("file", "File exists"), ("file/run", "Not a directory"), ("a" * 256, "File name too long")):
        said = refusal(train, tmp_path / name)
        assert said.startswith("--output_dir cannot be written: ")
        assert said.endswith(f"{why}: '{tmp_path / name}'")
    assert (tmp_path / "file").read_text() == "mine"

    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", "s3://x")
    assert refusal(train, tmp_path / "run").startswith("ACCELERATE_RECIPES_CACHE=s3://x is a URL: give a folder")
