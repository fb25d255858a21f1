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
import math
import re
import resource
import shutil
import socket
import tempfile

import pyarrow as pa
import pyarrow.parquet
import pytest
import runs
import torch
from huggingface_hub import constants

from shared.checkpoints import saving
from shared.config import options
from shared.errors import UserError
from shared.processes import folder_lock

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
    folder_lock.release_all()  # the end of the process would do that
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


def test_labels_of_every_form_and_file_are_the_same_run(train, nlp, tmp_path, capsys):
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
                continue  # which separated values cannot hold
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
    assert "4 of its rows (10 % of each label, chosen by --seed 0) are kept for it" in capsys.readouterr().err
    settings = options.load(tmp_path / "run/config.yaml")
    assert settings["label_column_name"] == names
    assert json.loads((tmp_path / "run/model/config.json").read_text())["label2id"] == {"art": 0, "news": 1, "sport": 2}


def test_a_rare_class_does_not_end_a_run(train, tmp_path):
    lines = [(f"text number {i} of some", "ab"[i % 2]) for i in range(40)]
    data = rows(tmp_path / "data.csv", *lines, ("the only one", "rare"))
    for seed in (0, 1, 2):
        flags = ["--train_file", data, "--validation_file", None, "--validation_split_percentage", 70, "--seed", seed]
        train(tmp_path / f"run{seed}", *flags, "--dry_run")


def test_a_dataset_that_cannot_be_indexed_or_lacks_what_a_run_asks_for_is_refused_at_once(
    train, nlp, monkeypatch, tmp_path
):
    import datasets
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from ()

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 9})
    load_data = nlp.load_data
    for data, said in (
        (
            Stream(),
            "Stream can only be read from front to back, so no order of its samples can be resumed exactly: store",
        ),
        (rows.to_iterable_dataset(), "IterableDataset can only be read from front to back"),
        (
            rows,
            "load_data gave a Dataset without lengths and digest: what a run asks of a data set is what TokenizedText",
        ),
    ):
        monkeypatch.setattr(nlp, "load_data", lambda config, data=data: (data, *load_data(config)[1:]))
        assert refusal(train, tmp_path).startswith(said)
    assert not files(tmp_path)


# Models


@pytest.fixture(scope="module")
def models(alone, tmp_path_factory):
    """Folders that are no text classifier, or a broken one."""
    from transformers import AutoTokenizer, ResNetConfig

    folder = tmp_path_factory.mktemp("models")
    (folder / "empty").mkdir()
    ResNetConfig().save_pretrained(folder / "images")
    for name in ("good", "without weights", "cut off", "other tokenizer", "images with tokenizer"):
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

    class Forgetful(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.forgotten = model, torch.nn.Linear(2, 2)

        def forward(self, **batch):
            return self.model(**batch)

    def build_with_a_layer_that_is_not_the_models(*args):
        model = build_model(*args)
        model.added = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(nlp, "build_model", build_with_a_layer_that_is_not_the_models)
    message = refusal(train, tmp_path / "refused")
    assert "has added.bias (2 weights differ) would be exported, and from_pretrained would not load it" in message
    monkeypatch.setattr(nlp, "build_model", lambda *args: Forgetful(build_model(*args)))
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


def test_other_data_are_refused_in_the_middle_of_a_run_and_when_it_has_finished(train, tmp_path, capsys):
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
    result = train(run, *flags, 4)
    assert runs.training_lines(run)[-1]["step"] == 4

    shutil.rmtree(run / "checkpoints")  # the finished run is compared all the same
    before = files(run)
    assert train(run, *flags, 4) == result
    assert capsys.readouterr().out.endswith(f"{run} holds this run, finished: {result}\n")
    rows(data, *lines, ("new words", "x"))
    assert "the data are not those that this run began with" in refusal(train, run, *flags, 4)
    rows(data, *[(text, "x") for text, _ in lines])
    assert "has fewer than two classes" in refusal(train, run, *flags, 4)
    data.unlink()
    assert train(run, *flags, 4) == result
    assert f"{result}; its data was not compared (--train_file {data}: no such file)" in capsys.readouterr().out
    assert files(run) == before
    record = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(', "data": "[^"]*"', "", record))
    assert train(run, *flags, 4) == result
    assert "its data was not compared, because an older version made the run" in capsys.readouterr().out


def test_the_data_decides_and_not_the_path_to_it(train, models, texts, tmp_path, monkeypatch, capsys):
    for name in ("train.csv", "valid.csv"):
        shutil.copy(texts[1].with_name(name), tmp_path)
    shutil.copytree(models / "good", tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    names = ["--validation_file", "valid.csv", "--lr_scheduler_type", "constant", "--warmup_ratio", None]
    flags = [*names, "--model_name_or_path", "bert", "--train_file", "train.csv", "--max_train_steps"]
    train("run", *flags, 2)
    before = files(tmp_path / "run")

    (tmp_path / "moved").mkdir()
    for name in ("train.csv", "valid.csv", "bert"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    named = ["--train_file", "moved/train.csv", "--validation_file", tmp_path / "moved/valid.csv"]
    moved = [*flags[2:-1], *named, "--model_name_or_path", "moved/bert", "--max_train_steps"]
    train("run", *moved, 2)
    assert capsys.readouterr().out.splitlines()[-1].startswith("run holds this run, finished: {")
    (tmp_path / "other.csv").write_text((tmp_path / "moved/train.csv").read_text().replace(" the ", " a "))
    other = [*moved[:-1], "--train_file", "other.csv", moved[-1]]
    for steps in (2, 4):  # of the finished run and of one that goes on
        assert "the data are not those that this run began with" in refusal(train, "run", *other, steps)
        gone = refusal(train, "run", *moved[:-1], "--train_file", "gone.csv", moved[-1], steps)
        assert "--train_file was train.csv, is gone.csv" in gone
    settings = json.loads((tmp_path / "moved/bert/config.json").read_text())
    (tmp_path / "moved/bert/config.json").write_text(json.dumps(settings | {"classifier_dropout": 0.5}))
    assert "--model_name_or_path was bert, is moved/bert" in refusal(train, "run", *moved, 4)
    (tmp_path / "moved/bert").rename(tmp_path / "bert")
    assert "its config is not the one that this run began with" in refusal(train, "run", *moved, 4, *flags[-5:-3])
    (tmp_path / "bert/config.json").write_text(json.dumps(settings))
    assert files(tmp_path / "run") == before

    train("run", *moved, 4, "--model_name_or_path", "./bert")
    assert "--train_file was train.csv, is moved/train.csv, --valid" in capsys.readouterr().out
    assert runs.training_lines(tmp_path / "run")[-1]["step"] == 4


def test_a_checkpoint_given_by_its_path_is_no_start_of_another_run(train, tmp_path):
    constant = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path / "run", *constant, 2)
    flags = [*constant, 4, "--resume_from_checkpoint", tmp_path / "run/checkpoints/step_00000002"]
    message = refusal(train, tmp_path / "new", *flags, "--learning_rate", 0.5)
    assert "step_00000002 belongs to a run decided by other settings (--learning_rate was 0.001, is 0.5)" in message
    assert message.endswith(
        "give the old values to go on with it, or leave out --resume_from_checkpoint for a new run, which can begin "
        "with the model/ of that one as --model_name_or_path"
    )


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


@pytest.mark.parametrize(
    ("of_training", "said"),
    [(True, "the gradients of 9 steps in a row were not finite"), (False, "its evaluation loss is nan: lower")],
)
def test_a_run_whose_losses_are_no_numbers_leaves_no_model(train, nlp, monkeypatch, tmp_path, of_training, said):
    losses = nlp.item_losses
    monkeypatch.setattr(
        nlp, "item_losses", lambda *a: losses(*a) * (math.nan if torch.is_grad_enabled() == of_training else 1.0)
    )
    flags = ["--max_train_steps", 9, "--logging_steps", 100, "--eval_steps", 100]
    for _ in range(2):  # and its last checkpoint does not make it better
        assert said in refusal(train, tmp_path, *flags)
        assert not list(tmp_path.glob("model*"))


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
