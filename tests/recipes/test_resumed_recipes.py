"""A run of each recipe that resumes from a checkpoint ends with the bytes of the uninterrupted one. Dropout is on."""

import pytest
import runs
import toy_data

CASES = [
    ("nlp", ["--no_packing"]),
    ("nlp", ["--freeze", "embeddings", "layer.0", "--layer_lr_decay", 0.5]),
    ("mlm", ["--model_type", "bert", "--whole_word_masking"]),
    ("mlm", ["--model_type", "roberta", "--whole_word_masking"]),
    ("mlm", ["--activation_dtype", "bf16", "--mixed_precision", "no"]),
    ("token_classification", ["--no_packing"]),
    ("embeddings", ["--symmetric", "--matryoshka_dims", 32, 8, "--kept_micro_batches", 2]),
    ("embeddings", ["--static"]),
    ("embeddings", ["--label_column_name", "score"]),
    ("image_classification", ["--ema_decay", 0.8, "--mixup", 0.2, "--optim", "muon"]),
    ("image_classification", ["--freeze", "resnet.embedder"]),  # new weights, which a checkpoint has though frozen
]


@pytest.mark.parametrize(("recipe", "flags"), CASES, ids=str)
def test_a_resumed_run_ends_with_the_same_bytes(recipe, flags, texts, tmp_path):
    data = toy_data.tiny(recipe, texts, tmp_path)
    every = [*data, *flags, "--checkpointing_steps", 4]
    if recipe in toy_data.RECIPES:
        bert = toy_data.write_encoder_with_dropout(tmp_path / "bert", recipe, data)
        every += ["--model_name_or_path", bert, "--learning_rate", 1e-3]
    results = runs.train(recipe, tmp_path / "whole", *every)
    middle = tmp_path / "whole/checkpoints/step_00000004"
    assert runs.train(recipe, tmp_path / "again", *every, "--resume_from_checkpoint", middle) == results
    assert runs.exported(tmp_path / "again") == runs.exported(tmp_path / "whole")
    last = [runs.training_lines(tmp_path / name)[-1] for name in ("whole", "again")]
    assert (last[0]["samples"], last[0]["loss"]) == (last[1]["samples"], last[1]["loss"])
