"""A run is the same training on any number of processes, also where each process needs a part of a micro-batch."""

import runs

# Each step fits one micro-batch, so that two processes cut it; an epoch ends with a step of fewer samples.
FLAGS = [
    *(*runs.TINY_IMAGES, "--per_device_train_batch_size", 48, "--max_train_samples", 200, "--max_train_steps", "None"),
    *("--num_train_epochs", 2, "--checkpointing_steps", 2, "--save_total_limit", "None"),
]


def test_a_run_with_batch_norm_that_goes_on_with_fewer_processes_keeps_its_micro_batches(tmp_path, capsys):
    whole = runs.run_many(2, {"whole": FLAGS}, tmp_path, recipe="recipes/image_classification.py")["whole"]
    resumed, checkpoint = tmp_path / "resumed", whole / "checkpoints/step_00000002"
    runs.train("image_classification", resumed, *FLAGS, "--resume_from_checkpoint", checkpoint)
    assert runs.distance(runs.weights(resumed), runs.weights(whole)) < 1e-5
    said = capsys.readouterr().out
    assert "resumed on 1 process, saved on 2: equal up to rounding" in " ".join(said.split())
    assert "as on the 2 processes of the first launch" in said
    assert {line["processes"] for line in runs.training_lines(whole)} == {2}
    assert {line["processes"] for line in runs.training_lines(resumed)} == {1}
