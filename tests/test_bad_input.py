"""What a user can get wrong is refused before the first step, in one line, and nothing of an earlier run is touched.

The functions that refuse data, labels, tokens, options and Hub names have tests of their own; here a recipe is called
as a whole, so that each of them is shown to be asked, and asked in time.
"""

import csv
import dataclasses
import errno
import hashlib
import importlib.util
import json
import resource
import shutil
import socket
import tempfile

import pytest
import runs
from huggingface_hub import constants

from shared import lock, options, saving
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def nlp():
    return runs.load_recipe("nlp")


@pytest.fixture
def train(nlp, texts):
    """A function that trains on the small data set; more flags come behind."""

    def call(output, *flags):
        return nlp.main(
            options.parse(nlp.Config, [*map(str, (*runs.TINY, *texts, *flags)), "--output_dir", str(output)])
        )

    return call


def refusal(train, output, *flags):
    """The one line with which a recipe refuses these flags."""
    with pytest.raises(UserError) as caught:
        train(output, *flags)
    lock.release_all()  # the end of the process would do that
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def files(folder):
    """Every file's digest and time."""
    return {
        path.relative_to(folder): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *lines])
    return path


# Data


def test_data_that_cannot_be_learned_from_are_refused(train, tmp_path):
    good = rows(tmp_path / "good.csv", ("a text", "x"), ("another", "y"), ("a third", "x"), ("the last", "y"))
    one_class = rows(tmp_path / "one.csv", ("a text", "x"), ("another", "x"), ("a third", "x"))
    new_label = rows(tmp_path / "new.csv", ("a text", "x"), ("another", "z"))
    no_text = rows(tmp_path / "empty.csv", ("a text", "x"), ("", "y"))
    for training, validation, said in (
        (tmp_path / "none.csv", good, f"--train_file {tmp_path / 'none.csv'}"),
        (one_class, good, f"--train_file {one_class} has fewer than two classes (x)"),
        (good, new_label, f"--validation_file {new_label} has a label in label that training does not have"),
        (no_text, good, f"--train_file {no_text}"),
    ):
        message = refusal(train, tmp_path / "run", "--train_file", training, "--validation_file", validation)
        assert said in message
    assert not files(tmp_path / "run")


# Models


@pytest.fixture(scope="module")
def models(alone, tmp_path_factory):
    """Folders that are no text classifier, or a broken one."""
    from transformers import AutoTokenizer, ResNetConfig

    folder = tmp_path_factory.mktemp("models")
    (folder / "empty").mkdir()
    ResNetConfig().save_pretrained(folder / "images")
    for name in ("without weights", "cut off", "other tokenizer", "images with tokenizer"):
        shutil.copytree(alone / "model", folder / name)
    (folder / "without weights/model.safetensors").unlink()
    with (folder / "cut off/model.safetensors").open("r+b") as file:
        file.truncate(5000)
    tokenizer = AutoTokenizer.from_pretrained(alone / "model")
    tokenizer.add_tokens(["another", "vocabulary"])
    tokenizer.save_pretrained(folder / "other tokenizer")
    ResNetConfig().save_pretrained(folder / "images with tokenizer")
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "no such folder"),
        ("empty", "holds no config.json: give a folder that save_pretrained wrote"),
        ("images", "cannot be loaded by AutoTokenizer (there is no tokenizer that can be read): give"),
        ("images with tokenizer", "by AutoModelForSequenceClassification (a ResNet is no such model): give"),
        ("without weights", "by AutoModelForSequenceClassification (Error no file named model.safetensors"),
        ("cut off", "cannot be loaded by AutoModelForSequenceClassification"),
    ],
)
def test_a_folder_that_holds_no_text_classifier_is_refused(train, models, tmp_path, name, said):
    message = refusal(train, tmp_path / "run", "--model_name_or_path", models / name)
    assert message.startswith(f"--model_name_or_path {models / name}")
    assert said in message
    assert not files(tmp_path / "run")


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(train, models, tmp_path):
    message = refusal(train, tmp_path, "--model_name_or_path", models / "other tokenizer")
    assert message.startswith("--model_name_or_path: the tokenizer has ids up to 401, but the model embeds only 400")


def test_a_max_length_beyond_the_model_is_refused(train, alone, tmp_path):
    flags = ["--model_name_or_path", alone / "model", "--max_length", 49]
    assert refusal(train, tmp_path, *flags) == "--max_length 49 is beyond the model's 48 positions: lower it"


def test_sizes_that_make_no_model_are_refused(train, tmp_path):
    message = refusal(train, tmp_path, "--num_attention_heads", 3)
    assert message.startswith("--hidden_size 32 is not a multiple of twice --num_attention_heads 3")


def test_parameters_that_the_loss_does_not_reach_are_frozen_said_and_the_run_resumes(
    train, nlp, monkeypatch, tmp_path, capsys
):
    import torch

    build_model = nlp.build_model

    def build_with_a_forgotten_layer(*args):
        model = build_model(*args)
        model.forgotten = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(nlp, "build_model", build_with_a_forgotten_layer)
    flags = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path / "whole", *flags, 4)
    said = "frozen, because the loss does not depend on them: forgotten.weight, forgotten.bias\n"
    assert said in capsys.readouterr().out
    train(tmp_path / "resumed", *flags, 2)
    train(tmp_path / "resumed", *flags, 4)
    assert torch.equal(runs.weights(tmp_path / "whole"), runs.weights(tmp_path / "resumed"))


# Batches and metrics


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max_tokens_per_micro_batch", 20], "--max_tokens_per_micro_batch 20 is smaller than sample "),
        (
            ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2],
            "--global_batch_size 12 is not 4 per device x 1 process x 2 accumulation steps = 8: leave out one of",
        ),
        (
            ["--metric_for_best_model", "bleu"],
            "--metric_for_best_model bleu is not computed: use one of loss, accuracy",
        ),
        (["--metric_name", "pearson"], "--metric_name pearson does not fit classification"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(train, tmp_path, flags, said):
    assert refusal(train, tmp_path, *flags).startswith(said)
    assert not files(tmp_path)


# The Hub


@pytest.fixture
def attempts(monkeypatch):
    """Connections that were tried while there is no network."""
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
def test_a_hub_name_without_a_network_is_tried_once(nlp, texts, attempts, tmp_path, flag, way_out):
    data = [] if flag == "--dataset_name" else [str(word) for word in texts]
    config = options.parse(nlp.Config, [*data, flag, "nobody/nothing", "--output_dir", str(tmp_path)])
    with pytest.raises(UserError, match=rf"{flag} nobody/nothing .*there is no network to .*: .*{way_out}"):
        nlp.main(config)
    assert len(attempts) == 1
    assert not files(tmp_path)


def test_an_upload_that_could_not_happen_is_refused_before_training(train, attempts, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    message = refusal(train, tmp_path, "--push_to_hub")
    assert message.startswith("--push_to_hub: there is no network to ")
    assert len(attempts) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert refusal(train, tmp_path, "--push_to_hub").startswith("--push_to_hub needs a token: set HF_TOKEN")
    assert len(attempts) == 1
    assert not files(tmp_path)


# The output folder


def test_a_folder_that_cannot_be_written_is_refused(train, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file/run", "Not a directory")):
        message = refusal(train, output)
        assert (
            message == f"--output_dir {output} cannot be written ({reason}): name another folder, or free space there"
        )
    assert (tmp_path / "file").read_text() == "mine"

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert "cannot be written (No space left on device)" in refusal(train, tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "what"), [([], "checkpoints/step_00000008"), (["--checkpointing_steps", "no"], "model")]
)
def test_a_disk_that_fills_up_during_the_run_ends_it_in_one_line(train, tmp_path, monkeypatch, flags, what):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the weights have 138 kB
    try:
        message = refusal(train, tmp_path, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path / what} (" in message
    assert "free space" in message
    assert not list(tmp_path.glob("model*"))
    assert len(runs.training_lines(tmp_path)) == 4


def test_another_run_in_the_folder_is_refused_with_the_difference_and_both_ways_out(train, alone):
    before = files(alone)
    message = refusal(train, alone, "--hidden_size", 64, "--seed", 3)
    assert "holds a run decided by other settings (--seed was 0, is 3, --hidden_size was 32, is 64)" in message
    assert message.endswith("give the old values to go on with it, or another --output_dir for a new run")
    assert "--max_train_steps was 8, is 9" in refusal(train, alone, "--max_train_steps", 9)  # the schedule is linear
    assert "--resume_from_checkpoint never" in refusal(train, alone, "--resume_from_checkpoint", "never")
    assert files(alone) == before


def test_other_data_in_the_middle_of_a_run_are_refused(train, tmp_path):
    lines = [(f"text number {i} of {'few' if i % 3 else 'some'}", "xy"[i % 2]) for i in range(40)]
    data, run = tmp_path / "data.csv", tmp_path / "run"
    flags = ["--train_file", data, "--validation_file", rows(tmp_path / "valid.csv", *lines[:9])]
    flags += ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    rows(data, *lines)
    train(run, *flags, 2)
    before = files(run)
    for changed in ([(text, "yx"["xy".index(label)]) for text, label in lines], [*lines, ("new words", "x")]):
        rows(data, *changed)
        assert "the data are not those that this run began with" in refusal(train, run, *flags, 4)
        assert files(run) == before
    rows(data, *lines)
    train(run, *flags, 4)
    assert runs.training_lines(run)[-1]["step"] == 4


def test_a_longer_run_that_is_refused_leaves_the_finished_one_as_it_was(train, tmp_path, monkeypatch):
    flags = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path, *flags, 2)
    before = files(tmp_path)
    with monkeypatch.context() as nothing_installed:
        nothing_installed.setattr(importlib.util, "find_spec", lambda _: None)
        assert refusal(train, tmp_path, *flags, 4, "--report_to", "wandb").startswith("--report_to wandb: the package")
    assert files(tmp_path) == before
    train(tmp_path, *flags, 4)
    assert runs.training_lines(tmp_path)[-1]["step"] == 4


def test_files_of_other_programs_are_not_overwritten(train, tmp_path):
    for name, content, said in (
        ("config.yaml", "window: 3\n", "was not written by a recipe"),
        ("metrics.jsonl", "loss 1.0\n{}\n", "line 1: not a JSON object with a step"),
    ):
        (tmp_path / name).write_text(content)
        assert said in refusal(train, tmp_path)
        assert (tmp_path / name).read_text() == content
        (tmp_path / name).unlink()


def test_a_run_without_a_checkpoint_is_replaced_and_that_is_said(train, tmp_path, capsys):
    train(tmp_path, "--checkpointing_steps", "no")
    shutil.rmtree(tmp_path / "model")
    train(tmp_path, "--seed", 7)
    said = f"{tmp_path} holds a run that left no checkpoint (--seed was 0, is 7): this one takes its place"
    assert said in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused(train, nlp, tmp_path, monkeypatch):
    flags = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path, *flags, 2)
    build_model = nlp.build_model

    def build_a_wider_one(config, *args):
        return build_model(dataclasses.replace(config, hidden_size=64), *args)

    monkeypatch.setattr(nlp, "build_model", build_a_wider_one)
    assert "step_00000002 does not fit this model (" in refusal(train, tmp_path, *flags, 4)


def test_a_checkpoint_that_is_not_there_is_refused(train, tmp_path):
    message = refusal(train, tmp_path, "--resume_from_checkpoint", tmp_path / "step_00000004")
    assert message.startswith(
        f"--resume_from_checkpoint {tmp_path / 'step_00000004'}: there is no such folder; use auto"
    )


def test_a_model_that_no_run_left_is_not_overwritten(train, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("mine")
    message = refusal(train, tmp_path)
    assert message.startswith(f"--output_dir {tmp_path} holds a folder model/ but no config.yaml")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "weights"]


# What is no mistake


def test_a_finished_run_says_so_and_returns_its_result_and_changes_nothing(train, alone, capsys):
    before = files(alone)
    for flags in ([], ["--logging_steps", 5, "--save_total_limit", 1], ["--dry_run"]):
        result = train(alone, *flags)
        assert f"{alone} holds this run, finished: {result}" in capsys.readouterr().out
        evaluated = [line for line in runs.metrics(alone) if "eval_loss" in line][-1]
        assert result == {name: value for name, value in evaluated.items() if name != "step"}
    assert files(alone) == before


def test_a_run_under_a_constant_schedule_can_be_made_longer(train, tmp_path, capsys):
    constant = ["--lr_scheduler_type", "constant", "--warmup_steps", 2]
    train(tmp_path / "grown", *constant, "--max_train_steps", 4)
    before = files(tmp_path / "grown")
    capsys.readouterr()

    train(tmp_path / "grown", *constant, "--dry_run")  # shows what would run, and changes nothing
    said = capsys.readouterr().out
    assert "8 of 12 samples" in said
    assert "resumed from step_00000004" in said
    assert files(tmp_path / "grown") == before
    assert "--max_train_steps was 4, is 3" in refusal(train, tmp_path / "grown", *constant, "--max_train_steps", 3)

    train(tmp_path / "grown", *constant)
    train(tmp_path / "at once", *constant)
    assert runs.weights(tmp_path / "grown").equal(runs.weights(tmp_path / "at once"))
    steps = [line["step"] for line in runs.training_lines(tmp_path / "grown")]
    assert steps == [2, 4, 6, 8]
    settings = options.load(tmp_path / "grown/config.yaml")
    assert settings["max_train_steps"] == 8


def test_config_and_state_of_a_run_hold_no_token(train, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "hf_secretsecret")
    train(tmp_path, "--max_train_steps", 1)
    assert not [path for path in files(tmp_path) if b"hf_secretsecret" in (tmp_path / path).read_bytes()]
    assert json.loads((tmp_path / "checkpoints/step_00000001/state.json").read_text())["step"] == 1
