"""The example with a head of one's own and a teacher gives the same run on 1 and 2 processes, and logs both losses."""

import pytest
import runs
import torch

RECIPE = runs.ROOT / "docs/examples/own_head.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own-head")
    texts = runs.write_texts(folder, 60, 17)
    bert = runs.write_bert_with_dropout(folder / "bert", texts)
    flags = [*texts, "--model_name_or_path", bert, "--teacher_name_or_path", bert, "--max_length", "48"]
    flags += ["--global_batch_size", "12", "--max_tokens_per_micro_batch", "192", "--max_train_steps", "6"]
    flags += ["--logging_steps", "2", "--learning_rate", "0.001"]
    return {n: runs.run_many(n, {f"on-{n}": flags}, folder, RECIPE)[f"on-{n}"] for n in (1, 2)}


def test_two_processes_train_the_same_weights(finished):
    one, two = (runs.weights_that_learn(finished[processes]) for processes in (1, 2))
    assert torch.allclose(one, two, rtol=0, atol=1e-5)


def test_the_losses_of_labels_and_teacher_are_logged_apart_and_add_up(finished):
    for line in runs.training_lines(finished[2]):
        assert line["loss"] == pytest.approx(line["loss_labels"] + line["loss_teacher"], rel=1e-5)
