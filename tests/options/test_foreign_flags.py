"""The flag names of other programs cause an error that names the flag of the recipes."""

import re
from pathlib import Path
from typing import Any

import pytest
import runs

from shared.config import command_line
from shared.config.options import parse
from shared.errors import UserError
from shared.options import foreign_flags


def recipe_fields() -> list[dict[str, Any]]:
    recipes = ("nlp", "mlm", "image_classification", "embeddings")
    return [command_line.field_types(runs.load_recipe(recipe).Config) for recipe in recipes]


def test_names_of_other_programs_lead_to_existing_flags() -> None:
    recipes = recipe_fields()
    for name, texts in foreign_flags.EQUIVALENTS.items():
        assert not [fields for fields in recipes if name in fields], f"{name} is a flag of ours"
        messages = {foreign_flags.equivalent(name, fields) for fields in recipes} - {None}
        assert len(messages) >= len(texts), f"{name}: {messages}"  # each text is the message of some recipe
    for name, advice in {
        "epochs": "use --num_train_epochs N",
        "lr": "use --learning_rate RATE",
        "bf16": "use --mixed_precision bf16",
        "resume": "the same command resumes its run; --resume_from_checkpoint PATH resumes from a certain checkpoint",
        "model": "use --model_name_or_path NAME",
    }.items():
        for recipe in ("nlp", "image_classification"):
            with pytest.raises(UserError, match=re.escape(f"unknown flag --{name}: {advice}")):
                parse(runs.load_recipe(recipe).Config, [f"--{name}", "3"])
    with pytest.raises(UserError, match=r"unknown flag --predict_file: after training, python -m shared\.predict"):
        parse(runs.load_recipe("embeddings").Config, ["--predict_file", "texts.csv"])
    with pytest.raises(UserError, match="unknown flag --per-device-eval-batch-size: evaluation uses the batch limits"):
        parse(runs.load_recipe("mlm").Config, ["--per-device-eval-batch-size=8"])


def test_a_line_of_yaml_with_a_name_of_another_program_gets_the_same_message(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("per_device_eval_batch_size: 8")
    with pytest.raises(UserError, match="per_device_eval_batch_size is not a setting: evaluation uses the batch"):
        parse(runs.load_recipe("nlp").Config, ["--config", str(tmp_path / "run.yaml")])
