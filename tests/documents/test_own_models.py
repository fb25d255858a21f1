"""The examples of models of one's own give the same run on 1 and 2 processes."""

import pytest
import runs
import torch


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function that trains an example on a number of processes, and returns the folder of the run."""
    folder = tmp_path_factory.mktemp("own-models")
    texts = runs.write_texts(folder, 60, 17)
    bert = runs.write_bert_with_dropout(folder / "bert", texts)
    flags = [*texts, "--model_name_or_path", bert, "--max_length", "48", "--global_batch_size", "12"]
    flags += ["--max_tokens_per_micro_batch", "192", "--max_train_steps", "6", "--logging_steps", "2"]
    more = {"own_head": [], "two_models": ["--teacher_name_or_path", bert]}

    def call(name, processes, learning_rate, **environment):
        job = f"{name}-{processes}-{learning_rate}-{len(environment)}"
        jobs = {job: [*flags, "--learning_rate", learning_rate, *more[name]]}
        recipe = runs.ROOT / f"docs/examples/{name}.py"
        return runs.run_many(processes, jobs, folder, recipe, **environment)[job]

    return call


def test_a_head_of_ones_own_and_two_optimizers_train_the_same_weights_on_two_processes(train):
    one, two = (runs.weights_that_learn(train("own_head", processes, "0.001")) for processes in (1, 2))
    assert torch.allclose(one, two, rtol=0, atol=1e-5)


@pytest.mark.clusters
def test_two_optimizers_train_and_save_under_fsdp(train):
    folder = train("own_head", 2, "0.0001", **runs.FSDP)
    one = runs.weights_that_learn(train("own_head", 1, "0.0001"))
    assert torch.allclose(one, runs.weights_that_learn(folder), rtol=0, atol=1e-4)
    assert (folder / "checkpoints/step_00000006/manifest.json").exists()


def test_a_teacher_gives_the_same_run_on_two_processes_and_its_loss_is_logged_apart(train):
    folders = [train("two_models", processes, "0.001") for processes in (1, 2)]
    one, two = map(runs.weights_that_learn, folders)
    assert torch.allclose(one, two, rtol=0, atol=1e-5)
    for line in runs.training_lines(folders[1]):
        assert line["loss"] == pytest.approx(line["loss_labels"] + line["loss_teacher"], rel=1e-5)
