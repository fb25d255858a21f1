"""The options of all recipes, and the errors for contradictory ones."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from example_config import Config

from shared.config import command_line, options
from shared.config.fields import Limits, Meaning, fields_with, limits_of
from shared.config.options import Options, check, parse
from shared.options.data_options import DataOptions

NAMES = [field.name for field in dataclasses.fields(Options)]


def test_every_field_has_a_docstring_and_a_default_and_the_defaults_pass_the_check() -> None:
    source = Path(options.__file__).read_text(encoding="utf-8").splitlines()
    lines = {line.split(":")[0].strip(): number for number, line in enumerate(source) if line.startswith("    ")}
    for name in NAMES:
        assert source[lines[name] + 1].startswith('    """'), name
    check(Options())
    check(Config())


RECIPES = [runs.load_recipe(path.stem).Config for path in sorted((runs.ROOT / "recipes").glob("*.py"))]


@pytest.mark.parametrize("config_class", RECIPES, ids=lambda one: one.__module__)
def test_pairs_of_fields_are_fields_of_the_recipe(config_class: type[Options]) -> None:
    pairs = config_class.ALTERNATIVES + config_class.NEEDS + config_class.EXCLUDES
    assert {field for pair in pairs for field in pair[:2]} <= {field.name for field in dataclasses.fields(config_class)}


def test_a_recipe_inherits_what_the_fields_mean_and_adds_its_own() -> None:
    for config_class in RECIPES:
        for meaning in (Meaning.NOT_IN_RESULT, Meaning.CHOOSES_MODEL, Meaning.MAY_GROW, Meaning.MAY_DIFFER):
            assert fields_with(Options, meaning) <= fields_with(config_class, meaning)
        assert fields_with(DataOptions, Meaning.NAMES_DATA) <= fields_with(config_class, Meaning.NAMES_DATA)
        kinds = (Meaning.NOT_IN_RESULT, Meaning.CHOOSES_MODEL, Meaning.MAY_GROW)
        assert sum(len(fields_with(config_class, kind)) for kind in kinds) == len(fields_with(config_class, *kinds))
    added = {name for each in RECIPES for name in fields_with(each, Meaning.NOT_IN_RESULT, Meaning.NAMES_DATA)}
    added -= fields_with(DataOptions, Meaning.NOT_IN_RESULT, Meaning.NAMES_DATA)
    images = {"train_dir", "validation_dir", "cache", "channels_last"}
    assert added == images | {"kept_micro_batches", "prepared_data", "cache_gb", "corpus_file", "trust_remote_code"}


# The command line


def test_a_subclass_has_the_flags_of_both_and_its_own_defaults() -> None:
    config = parse(Config, ["--seed", "3", "--text_column_names", "question", "answer", "--max-length", "64"])
    assert (config.seed, config.text_column_names, config.max_length) == (3, ("question", "answer"), 64)
    assert (config.output_dir, config.learning_rate) == ("out/nlp", 5e-5)
    assert parse(Config, []) == Config()


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-3\nmixed_precision: no\ncheckpointing_steps: 500\nseed: 1")
    config = parse(Config, ["--config", str(tmp_path / "run.yaml"), "--seed", "2"])
    assert (config.learning_rate, config.mixed_precision, config.checkpointing_steps) == (0.001, "no", "500")
    assert (config.seed, config.max_length) == (2, 128)


def test_an_alternative_resets_the_other_one_unless_both_are_given(tmp_path: Path) -> None:
    assert parse(Config, ["--warmup_steps", "0"]).warmup_ratio is None
    derived = parse(Config, ["--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "8"])
    assert (derived.global_batch_size, derived.gradient_accumulation_steps) == (None, 4)
    (tmp_path / "run.yaml").write_text("warmup_steps: 100\nwarmup_ratio: null")
    stored = ["--config", str(tmp_path / "run.yaml")]
    assert (parse(Config, stored).warmup_steps, parse(Config, stored).warmup_ratio) == (100, None)
    changed = parse(Config, [*stored, "--warmup_ratio", "0.1"])
    assert (changed.warmup_steps, changed.warmup_ratio) == (None, 0.1)
    both = parse(
        Config, ["--gradient_accumulation_steps=4", "--per_device_train_batch_size=8", "--global_batch_size=9"]
    )
    assert (both.global_batch_size, both.gradient_accumulation_steps) == (9, 4)  # the launch checks whether they fit


RECIPE = '''
"""A recipe."""
from dataclasses import dataclass
from shared.config.options import Options, parse
@dataclass(frozen=True, kw_only=True)
class Config(Options):
    max_length: int = 128
    """Longest sequence."""
parse(Config)
import sys; print({"torch", "transformers", "accelerate", "datasets", "numpy"} & set(sys.modules))
'''


def test_help_lists_every_flag_and_parsing_imports_no_heavy_package(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    environment = {"COLUMNS": "100", "PYTHONPATH": str(Path(__file__).parents[2])}
    shown, ran = (
        subprocess.run([sys.executable, recipe, *argv], env=environment, capture_output=True, text=True, check=True)
        for argv in (["--help"], [])
    )
    assert shown.stdout.startswith("A recipe.\n")
    for name in [*NAMES, "max_length"]:
        assert f"--{name} " in shown.stdout
    assert "Weight decay, decoupled with adamw; not applied to biases and norms. (default: 0.01)" in shown.stdout
    assert {len(line) for line in shown.stdout.splitlines() if line.startswith("│")} == {100}
    assert ran.stdout == "set()\n"


# The check


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": math.nan}, "--learning_rate nan: expected a number or None"),
        ({"learning_rate": "1e-3"}, "--learning_rate '1e-3': expected a number or None"),
        ({"seed": True}, "--seed True: expected a whole number"),
        ({"seed": 10**23}, f"--seed {10**23}: must be at most {2**31 - 1}"),
        (
            {"adam_beta1": 0.5, "optim": "sgd"},
            "--adam_beta1 0.5 has no effect without --optim adamw: give both, or neither",
        ),
        ({"text_column_names": ["text", 1]}, "--text_column_names ('text', 1): expected a string, or several"),
        ({"output_dir": "s3://x"}, "--output_dir s3://x is a URL: give a folder (mirrors: docs/checkpoints.md)"),
        ({"checkpointing_steps": "often"}, "--checkpointing_steps 'often': expected epoch, no, or a number of steps"),
    ],
)
def test_check_refuses_a_value_in_one_line(changed: dict[str, Any], message: str) -> None:
    assert runs.refusal(check, Config(**changed)) == message


@pytest.mark.parametrize("config_class", RECIPES, ids=lambda one: one.__module__)
def test_every_recipe_refuses_numbers_beyond_each_of_their_limits(config_class: type[Options]) -> None:
    for name, kind in command_line.kinds_of(config_class).items():
        number = kind.one
        if number not in (int, float):
            continue
        limits = limits_of(config_class).get(name) or Limits(least=1 if number is int else 0)
        beyond = (limits.above, limits.below, limits.least - 1, limits.most + 1)
        for value in map(number, filter(math.isfinite, beyond)):
            assert runs.refusal(parse, config_class, [f"--{name}", str(value)]) == f"--{name} {value}: must be {limits}"


@pytest.mark.parametrize(
    ("changed", "first", "second"),
    [
        ({"warmup_steps": 0}, "--warmup_steps 0", "--warmup_ratio 0.06"),
        ({"dataset_name": "glue", "train_file": "a.csv"}, "--dataset_name glue", "--train_file a.csv"),
        ({"hub_model_id": "me/x"}, "--hub_model_id me/x", "--push_to_hub"),
        ({"early_stopping_patience": 2}, "--early_stopping_patience 2", "--metric_for_best_model"),
        ({"gradient_accumulation_steps": 4}, "--gradient_accumulation_steps 4", "--per_device_train_batch_size"),
        ({"global_batch_size": None}, "--global_batch_size None", "--gradient_accumulation_steps"),
        ({"micro_batches_per_step": 300}, "--micro_batches_per_step 300", "--global_batch_size 256"),
        (
            {"micro_batches_per_step": 4, "per_device_train_batch_size": 8},
            "--global_batch_size 256",
            "--micro_batches_per_step 4 x --per_device_train_batch_size 8 = 32",
        ),
    ],
)
def test_check_refuses_a_contradiction_and_names_both_flags(changed: dict[str, Any], first: str, second: str) -> None:
    message = runs.refusal(check, Config(**changed))
    assert message.startswith(first)
    assert second in message


# The learning rate


@pytest.mark.parametrize(
    ("recipe", "pretrained", "rate"),
    [
        ("nlp", {}, 1e-3),
        ("nlp", {"model_name_or_path": "a/model"}, 5e-5),
        ("nlp", {"model_name_or_path": "a/model", "lora_rank": 8}, 5e-4),
        ("mlm", {}, 2e-3),
        ("mlm", {"model_name_or_path": "a/model"}, 5e-5),
        ("image_classification", {}, 0.2),
        ("image_classification", {"model_name_or_path": "a/model"}, 0.01),
        ("image_classification", {"model_name_or_path": "a/model", "freeze_backbone": True}, 0.2),
        ("image_classification", {"model_name_or_path": "a/model", "from_scratch": True}, 0.2),
    ],
)
def test_new_and_pretrained_weights_have_different_default_learning_rates(
    recipe: str, pretrained: dict[str, Any], rate: float
) -> None:
    config = runs.load_recipe(recipe).Config(**pretrained)
    assert config.base_learning_rate() == rate
    assert dataclasses.replace(config, learning_rate=0.125).base_learning_rate() == 0.125


def test_names_of_other_programs_lead_to_the_flags_of_the_recipes(tmp_path: Path) -> None:
    configs = [runs.load_recipe(recipe).Config for recipe in ("nlp", "mlm", "image_classification", "embeddings")]
    fields = {name for config in configs for name in command_line.kinds_of(config)}
    assert not command_line.OTHER_NAMES.keys() & fields
    for name, ours in command_line.OTHER_NAMES.items():
        assert runs.refusal(parse, configs[0], [f"--{name}", "3"]) == f"unknown flag --{name}: did you mean --{ours}?"
    unknown = runs.refusal(parse, configs[2], ["--max-seq-length", "3"])
    assert unknown == "unknown flag --max-seq-length: --help lists all settings"
    (tmp_path / "run.yaml").write_text("lr: 1e-3")
    given = ["--config", str(tmp_path / "run.yaml")]
    assert "lr is not a setting: did you mean learning_rate" in runs.refusal(parse, configs[0], given)
