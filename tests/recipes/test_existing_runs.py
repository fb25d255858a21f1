"""An existing run folder is resumed, causes an error, or is left unchanged; no file of an earlier run is damaged."""

import json
import re
import shutil

import pytest
import runs
from runs import files, refusal, write_rows

from shared.checkpoints import folders
from shared.config import options
from shared.extras import hub
from shared.plan import draws

CONSTANT = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]


def test_other_settings_in_an_existing_folder_are_refused_with_the_difference_and_two_solutions(train, alone):
    before = files(alone)
    message = refusal(train, alone, "--hidden_size", 64, "--seed", 3)
    assert "belongs to a run with other settings (--seed was 0, is 3, --hidden_size was 32, is 64)" in message
    assert "--max_train_steps was 8, is 9" in refusal(train, alone, "--max_train_steps", 9)  # the schedule is linear
    never = refusal(train, alone, "--resume_from_checkpoint", "never")
    assert re.search(r"--resume_from_checkpoint never, but .* holds checkpoints up to step 8", never)
    assert files(alone) == before


def test_other_data_are_refused_during_a_run_and_after_its_end(train, tmp_path, capsys):
    lines = [(f"text number {i} of {'few' if i % 3 else 'some'}", "xy"[i % 2]) for i in range(40)]
    data, valid, run = tmp_path / "data.csv", tmp_path / "valid.csv", tmp_path / "run"
    flags = ["--train_file", data, "--validation_file", valid, *CONSTANT]
    write_rows(data, *lines)
    write_rows(valid, *lines[:9])
    train(run, *flags, 2)
    before = files(run)
    for file, rows in ((data, lines), (valid, lines[:9])):
        write_rows(file, *[(text, "x" if i == 1 else label) for i, (text, label) in enumerate(rows)])
        assert refusal(train, run, *flags, 4).startswith("the data have changed since this run began")
        assert files(run) == before
        write_rows(file, *rows)
    result = train(run, *flags, 4)
    assert runs.training_lines(run)[-1]["step"] == 4

    shutil.rmtree(run / "checkpoints")  # the data of a finished run are still compared
    before = files(run)
    assert train(run, *flags, 4) == result
    assert capsys.readouterr().out.endswith(f"{run} holds this run, finished: {result}\n")
    write_rows(data, *lines, ("new words", "x"))
    assert "the data have changed since this run began" in refusal(train, run, *flags, 4)
    data.unlink()
    assert refusal(train, run, *flags, 4) == f"--train_file {data}: no such file"
    assert files(run) == before


def test_moved_data_are_accepted_and_changed_data_are_refused(train, models, texts, tmp_path, monkeypatch, capsys):
    for name in ("train.csv", "valid.csv"):
        shutil.copy(texts[1].with_name(name), tmp_path)
    shutil.copytree(models / "good", tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    named = ["--model_name_or_path", "bert", "--train_file", "train.csv", "--validation_file", "valid.csv"]
    train("run", *named, *CONSTANT, 2)
    before = files(tmp_path / "run")

    (tmp_path / "moved").mkdir()
    for name in ("train.csv", "valid.csv", "bert"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    moved = ["--train_file", "moved/train.csv", "--validation_file", tmp_path / "moved/valid.csv"]
    moved += ["--model_name_or_path", "moved/bert", *CONSTANT]
    train("run", *moved, 2)
    assert capsys.readouterr().out.splitlines()[-1].startswith("run holds this run, finished: {")
    for steps in (2, 4):  # the finished run, and a run that resumes
        gone = refusal(train, "run", *moved, steps, "--train_file", "gone.csv")
        assert "--train_file was train.csv, is gone.csv" in gone
    settings = json.loads((tmp_path / "moved/bert/config.json").read_text())
    (tmp_path / "moved/bert/config.json").write_text(json.dumps(settings | {"classifier_dropout": 0.5}))
    assert "--model_name_or_path was bert, is moved/bert" in refusal(train, "run", *moved, 4)
    (tmp_path / "moved/bert").rename(tmp_path / "bert")
    assert "its config has changed since this run began" in refusal(train, "run", *moved, 4, *named[:2])
    (tmp_path / "bert/config.json").write_text(json.dumps(settings))
    assert files(tmp_path / "run") == before

    train("run", *moved, 4, "--model_name_or_path", "./bert")
    assert "--train_file was train.csv, is moved/train.csv, --valid" in capsys.readouterr().out
    assert runs.training_lines(tmp_path / "run")[-1]["step"] == 4


def test_a_run_with_other_settings_cannot_start_from_a_checkpoint(train, tmp_path):
    train(tmp_path / "run", *CONSTANT, 2)
    flags = [*CONSTANT, 4, "--resume_from_checkpoint", tmp_path / "run/checkpoints/step_00000002"]
    message = refusal(train, tmp_path / "new", *flags, "--learning_rate", 0.5)
    assert "step_00000002 belongs to a run with other settings (--learning_rate was 0.001, is 0.5)" in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.yaml", "window: 3\n", "was not written by a recipe"),
        ("metrics.jsonl", "loss 1.0\n{}\n", "line 1: not a JSON object with a step"),
        ("model/weights", "mine", "holds a folder model/ but no config.yaml"),
    ],
)
def test_files_of_other_programs_are_not_overwritten(train, tmp_path, name, content, expected):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    before = files(tmp_path)
    assert expected in refusal(train, tmp_path)
    assert files(tmp_path) == before


def test_a_run_without_a_checkpoint_is_replaced_and_the_output_mentions_it(train, tmp_path, capsys):
    train(tmp_path, "--checkpointing_steps", "no")
    shutil.rmtree(tmp_path / "model")
    train(tmp_path, "--seed", 7)
    expected = f"{tmp_path} holds a run without a checkpoint (--seed was 0, is 7): the new run replaces it"
    assert expected in capsys.readouterr().out


def test_a_checkpoint_with_another_order_of_samples_is_refused_and_its_finished_run_is_not(train, tmp_path):
    """The first order of samples was not recorded in state.json."""
    result = train(tmp_path, *CONSTANT, 2)
    checkpoint = tmp_path / "checkpoints/step_00000002"
    state, manifest = (json.loads((checkpoint / name).read_text()) for name in ("state.json", "manifest.json"))
    assert state.pop("order") == draws.VERSION
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest |= folders.lines_of({"state.json": checkpoint / "state.json"})
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    before = files(tmp_path)
    message = refusal(train, tmp_path, *CONSTANT, 4)
    assert message.startswith(f"{checkpoint} belongs to a run that orders its samples in another way (version 1 of")
    assert train(tmp_path, *CONSTANT, 2) == result
    assert files(tmp_path) == before


def test_a_finished_run_prints_its_result_uploads_its_model_and_changes_nothing(train, alone, capsys, monkeypatch):
    before, uploaded = files(alone), []
    for flags in ([], ["--logging_steps", 5, "--save_total_limit", 1], ["--dry_run"]):
        result = train(alone, *flags)
        assert f"{alone} holds this run, finished: {result}" in capsys.readouterr().out
        assert result == {name: value for name, value in runs.evaluation(alone).items() if name != "step"}
    monkeypatch.setattr(hub, "require_upload", lambda _: None)
    monkeypatch.setattr(hub, "push", lambda folder, _: uploaded.append(folder))
    train(alone, "--push_to_hub", "--dry_run")
    train(alone, "--push_to_hub")
    assert (uploaded, files(alone)) == ([alone / "model"], before)


def test_a_run_under_a_constant_schedule_can_be_made_longer(train, tmp_path, capsys):
    train(tmp_path / "grown", *CONSTANT, 4)
    before = files(tmp_path / "grown")
    capsys.readouterr()

    train(tmp_path / "grown", *CONSTANT, 8, "--dry_run")  # prints what would run, and changes nothing
    output = capsys.readouterr().out
    assert "8 of 12 samples" in output
    assert "resumed from step_00000004" in output
    assert files(tmp_path / "grown") == before
    assert "--max_train_steps was 4, is 3" in refusal(train, tmp_path / "grown", *CONSTANT, 3)

    for name in ("grown", "in one go"):
        train(tmp_path / name, *CONSTANT, 8)
    assert runs.weights(tmp_path / "grown").equal(runs.weights(tmp_path / "in one go"))
    assert [line["step"] for line in runs.training_lines(tmp_path / "grown")] == [2, 4, 6, 8]
    assert options.load(tmp_path / "grown/config.yaml")["max_train_steps"] == 8


def test_a_run_is_not_made_longer_from_an_end_where_a_longer_run_is_another_one(train, tmp_path):
    epochs = [*CONSTANT, None, "--global_batch_size", 48, "--num_train_epochs"]
    train(tmp_path / "short", *epochs, 1)  # 160 samples
    assert "last step had fewer than --global_batch_size 48 samples" in refusal(train, tmp_path / "short", *epochs, 2)

    best = ["--eval_steps", 2, "--metric_for_best_model", "loss", "--load_best_model_at_end", *CONSTANT]
    train(tmp_path / "odd", *best, 3)
    assert "after it, whose last evaluation" in refusal(train, tmp_path / "odd", *best, 4)
    start = ["--resume_from_checkpoint", tmp_path / "odd/checkpoints/step_00000002"]
    train(tmp_path / "odd", *best, 6, *start)
    train(tmp_path / "in one go", *best, 6)
    assert runs.exported(tmp_path / "odd") == runs.exported(tmp_path / "in one go")


def test_the_files_of_a_run_contain_no_access_token(train, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "hf_secretsecret")
    train(tmp_path, "--max_train_steps", 1)
    assert not [path for path in files(tmp_path) if b"hf_secretsecret" in (tmp_path / path).read_bytes()]
    assert json.loads((tmp_path / "checkpoints/step_00000001/state.json").read_text())["step"] == 1
