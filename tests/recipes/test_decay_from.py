"""--decay_from: a run begins in the stable phase of another one, decays from there, and leaves its folder as it was."""

import json
import shutil

import pytest
import runs
from runs import files, refusal

from shared.checkpoints import resuming

STABLE, END = 6, 10  # steps
FLAGS = [
    *("--lr_scheduler_type", "warmup_stable_decay", "--warmup_steps", 2, "--eval_steps", 2, "--ema_decay", 0.5),
    *("--checkpointing_steps", 2, "--save_total_limit", "None", "--learning_rate", 0.01, "--max_train_steps"),
]


@pytest.fixture(scope="module")
def flags(texts, tmp_path_factory):
    """A small BERT with dropout, which shows whether a branch draws the numbers of its step."""
    bert = runs.write_bert_with_dropout(tmp_path_factory.mktemp("bert") / "bert", texts)
    return [*runs.TINY, *texts, "--model_name_or_path", bert, *FLAGS]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The folder of a run that decays after STABLE steps by its own --decay_ratio."""
    folder = tmp_path_factory.mktemp("decay") / "whole"
    runs.train("nlp", folder, *flags, END, "--decay_ratio", (END - STABLE) / END)
    return folder


@pytest.fixture
def train(flags):
    return lambda output, *more: runs.train("nlp", output, *flags, *more)


def at(run, step=STABLE):
    return resuming.checkpoints_of(run)[step]


def test_a_branch_is_the_run_with_that_decay_also_after_kills_and_leaves_the_other_folder_as_it_was(
    train, whole, flags, tmp_path
):
    before, branch = files(whole), [END, "--decay_from", at(whole)]
    results = train(tmp_path / "whole", *branch)
    assert runs.exported(tmp_path / "whole") == runs.exported(whole)
    assert {"step": END} | results == runs.evaluation(whole)
    for step in (None, 8):
        runs.train_until(step, "nlp", tmp_path / "killed", *flags, *branch)
    assert [*resuming.checkpoints_of(tmp_path / "killed")] == [8]
    shutil.copytree(tmp_path / "killed", tmp_path / "two-2")
    gone = at(whole).rename(whole / "gone")  # as --save_total_limit may remove it
    try:
        assert train(tmp_path / "killed", *branch) == results
        two = runs.run_many(2, {"two": [*flags, *branch]}, tmp_path)["two"]
    finally:
        gone.rename(whole / "checkpoints/step_00000006")
    assert runs.exported(tmp_path / "killed") == runs.exported(whole)
    assert runs.distance(runs.weights_that_learn(two), runs.weights_that_learn(whole)) < 1e-5
    rates = [[line["learning_rate"] for line in runs.training_lines(folder)] for folder in (tmp_path / "killed", whole)]
    assert rates[0] == rates[1][-len(rates[0]) :]
    assert files(whole) == before


def test_a_branch_of_a_constant_run_may_end_elsewhere_and_has_a_best_model_and_tracker_of_its_own(train, tmp_path):
    best = ["--metric_for_best_model", "loss", "--load_best_model_at_end"]
    train(tmp_path / "run", 4, "--lr_scheduler_type", "constant", *best)
    train(tmp_path / "branch", 6, "--decay_from", at(tmp_path / "run", 4), *best)
    assert runs.training_lines(tmp_path / "branch")[-1]["learning_rate"] == pytest.approx(0.01 * (1 - 0.5**0.5))
    before, after = (
        json.loads((resuming.checkpoints_of(tmp_path / name)[step] / "state.json").read_text())
        for name, step in (("run", 4), ("branch", 6))
    )
    assert (before["best_step"], after["best_step"]) == (4, 6)
    assert before["run_id"] != after["run_id"]


@pytest.mark.parametrize(
    ("steps", "step", "more", "message"),
    [
        (END, 8, [], "its last step had a learning rate of 0.00"),
        (END, 2, [], "its last step had a learning rate of 0.0066"),
        (STABLE, STABLE, [], "the run ends at step 6: give it more steps"),
        (END, STABLE, ["--warmup_steps", 1], "other settings (--warmup_steps was 2, is 1): use the old"),
        (END, STABLE, ["--max_train_samples", 99], "begin a new run in another --output_dir, without"),
        (END, 7, [], "it cannot be read ([Errno 2] No such file"),
        (END, STABLE, ["--decay_from", "a"], "expected a folder such as"),
        (END, STABLE, ["--decay_ratio", 0.1], "exclude each other"),
        (END, STABLE, ["--lr_scheduler_type", "linear"], "has no effect without"),
    ],
)
def test_a_branch_that_cannot_be_one_is_refused_in_one_line(train, whole, tmp_path, steps, step, more, message):
    before = files(whole)
    checkpoint = whole / f"checkpoints/step_{step:08d}"
    assert message in refusal(train, tmp_path / "branch", steps, "--decay_from", checkpoint, *more)
    assert not list((tmp_path / "branch").glob("*"))
    assert files(whole) == before


def test_a_branch_of_other_data_or_a_renamed_checkpoint_or_in_the_folder_of_a_run_is_refused(
    train, whole, texts, tmp_path
):
    branch = [END, "--decay_from", at(whole)]
    assert "--decay_from was None, is" in refusal(train, whole, *branch)
    shutil.copytree(at(whole), tmp_path / "step_00000005")
    message = refusal(train, tmp_path / "branch", END, "--decay_from", tmp_path / "step_00000005")
    assert "is the checkpoint of step 6" in message
    file = tmp_path / "train.csv"
    file.write_text("".join(texts[1].read_text().splitlines(keepends=True)[:-1]))
    message = refusal(train, tmp_path / "branch", *branch, "--train_file", file)
    assert message.startswith("the data have changed")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(whole / "config.yaml", other)
    assert f"{other} belongs to a run with other settings" in refusal(train, other, *branch)
