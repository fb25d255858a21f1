"""What every recipe can be told, what of it contradicts itself, and what a resumed run may change."""

import dataclasses
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import runs
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shared.config import command_line, foreign_flags, options
from shared.config.limits import Share
from shared.config.options import Options, check, differences, load, parse, save
from shared.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """A recipe's Config: fields of its own, another default, and a ratio as its default warm-up."""

    NEVER_MATTERS = Options.NEVER_MATTERS | {"tokenizer_processes"}

    output_dir: str = "out/nlp"
    """Folder of the run."""
    global_batch_size: int | None = 256
    """Samples per optimizer step."""
    warmup_ratio: float | None = 0.06
    """Share of all optimizer steps."""
    max_length: int = 128
    """Longest sequence, in tokens."""
    max_tokens_per_micro_batch: int | None = 4096
    """Most tokens of one micro-batch."""
    mlm_probability: Share = 0.15
    """Share of the tokens that are masked."""
    text_column_names: tuple[str, ...] = ("text",)
    """Columns that hold the text."""
    tokenizer_processes: int | None = None
    """Processes that tokenize."""


NAMES = [field.name for field in dataclasses.fields(Options)]


def test_every_field_has_a_docstring_and_a_default_and_the_defaults_pass_the_check() -> None:
    source = Path(options.__file__).read_text(encoding="utf-8").splitlines()
    lines = {line.split(":")[0].strip(): number for number, line in enumerate(source) if line.startswith("    ")}
    for name in NAMES:
        assert source[lines[name] + 1].startswith('    """'), name
    check(Options())
    check(Config())


@pytest.mark.parametrize("name", ["NEVER_MATTERS", "CHOOSES_THE_MODEL", "MAY_GROW"])
def test_the_sets_name_fields_only(name: str) -> None:
    assert getattr(Options, name)
    assert getattr(Options, name) <= set(NAMES)
    assert {field for pair in Options.ALTERNATIVES + Options.NEEDS for field in pair} <= set(NAMES)


def test_no_field_is_of_two_kinds() -> None:
    assert not Options.NEVER_MATTERS & Options.CHOOSES_THE_MODEL
    assert not (Options.NEVER_MATTERS | Options.CHOOSES_THE_MODEL) & Options.MAY_GROW


# The command line


def test_a_subclass_has_the_flags_of_both_and_its_own_defaults() -> None:
    config = parse(Config, ["--seed", "3", "--text_column_names", "question", "answer", "--max-length", "64"])
    assert (config.seed, config.text_column_names, config.max_length) == (3, ("question", "answer"), 64)
    assert (config.output_dir, config.learning_rate) == ("out/nlp", 5e-5)
    assert parse(Config, []) == Config()


def test_defaults_then_the_file_then_flags(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-3\nmixed_precision: no\ncheckpointing_steps: 500\nseed: 1")
    config = parse(Config, ["--config", str(tmp_path / "run.yaml"), "--seed", "2"])
    assert (config.learning_rate, config.mixed_precision, config.checkpointing_steps) == (0.001, "no", "500")
    assert (config.seed, config.max_length) == (2, 128)


def test_argv_defaults_to_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nlp.py", "--seed", "5"])
    assert parse(Options).seed == 5


def test_one_of_two_alternatives_takes_back_the_other_that_was_not_given_beside_it(tmp_path: Path) -> None:
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
    assert (both.global_batch_size, both.gradient_accumulation_steps) == (9, 4)  # whether it fits, the launch knows


def test_parse_checks() -> None:
    with pytest.raises(UserError, match=r"^--learning_rate -1.0: must be above 0$"):
        parse(Config, ["--learning_rate", "-1"])


def recipe_fields() -> list[dict[str, Any]]:
    recipes = ("nlp", "mlm", "image_classification")
    return [command_line.field_types(runs.load_recipe(recipe).Config) for recipe in recipes]


def test_names_of_other_programs_lead_to_flags_that_there_are() -> None:
    recipes = recipe_fields()
    for name, texts in foreign_flags.OURS.items():
        assert not [fields for fields in recipes if name in fields], f"{name} is a flag of ours"
        said = {foreign_flags.ours(name, fields) for fields in recipes} - {None}
        assert len(said) >= len(texts), f"{name}: {said}"  # each text is said by some recipe
    for name, advice in {
        "epochs": "use --num_train_epochs N",
        "lr": "use --learning_rate RATE",
        "bf16": "use --mixed_precision bf16",
        "resume": "the same command goes on with its run; --resume_from_checkpoint PATH takes a certain one",
        "model": "use --model_name_or_path NAME",
    }.items():
        for recipe in ("nlp", "image_classification"):
            with pytest.raises(UserError, match=re.escape(f"unknown flag --{name}: {advice}")):
                parse(runs.load_recipe(recipe).Config, [f"--{name}", "3"])
    said_of_evaluation = "evaluation takes its batches from the budget of training, --max_tokens_per_micro_batch or"
    with pytest.raises(UserError, match=f"unknown flag --per-device-eval-batch-size: {said_of_evaluation}"):
        parse(runs.load_recipe("mlm").Config, ["--per-device-eval-batch-size=8"])


def test_a_line_of_yaml_with_a_name_of_another_program_is_answered_alike(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("per_device_eval_batch_size: 8")
    with pytest.raises(UserError, match="per_device_eval_batch_size is no setting: evaluation takes its batches from"):
        parse(Config, ["--config", str(tmp_path / "run.yaml")])


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


def test_help_of_a_recipe_lists_every_flag_and_nothing_heavy_is_imported_for_it(tmp_path: Path) -> None:
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
    assert "Weight decay, with adamw decoupled; biases and norms have none. (default: 0.01)" in shown.stdout
    assert {len(line) for line in shown.stdout.splitlines() if line.startswith("│")} == {100}
    assert ran.stdout == "set()\n"


# The check


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": -1e-3}, "--learning_rate -0.001: must be above 0"),
        ({"learning_rate": math.nan}, "--learning_rate nan: expected a number or None"),
        ({"learning_rate": "1e-3"}, "--learning_rate '1e-3': expected a number or None"),
        ({"seed": True}, "--seed True: expected a whole number"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"seed": 10**23}, f"--seed {10**23}: must be at most {2**31 - 1}"),
        ({"weight_decay": -0.1}, "--weight_decay -0.1: must be at least 0"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm -1.0: must be at least 0"),
        ({"global_batch_size": 0}, "--global_batch_size 0: must be at least 1"),
        ({"num_train_epochs": 0}, "--num_train_epochs 0: must be at least 1"),
        ({"save_total_limit": 0}, "--save_total_limit 0: must be at least 1"),
        ({"dataloader_num_workers": -1}, "--dataloader_num_workers -1: must be at least 0"),
        ({"max_length": 0}, "--max_length 0: must be at least 1"),  # a field of the subclass
        ({"warmup_ratio": 1.5}, "--warmup_ratio 1.5: must be between 0 and 1"),
        ({"mlm_probability": 1.5}, "--mlm_probability 1.5: must be between 0 and 1"),
        ({"validation_split_percentage": 100}, "--validation_split_percentage 100: must be between 1 and 99"),
        ({"learning_rate": 0.0}, "--learning_rate 0.0: must be above 0"),
        ({"learning_rate": 0}, "--learning_rate 0: must be above 0"),
        ({"peak_tflops": 0.0}, "--peak_tflops 0.0: must be above 0"),
        ({"report_to": ("wandb", "none")}, "--report_to wandb none: give each tracker once, or none alone"),
        ({"report_to": ("wandb", "wandb")}, "--report_to wandb wandb: give each tracker once, or none alone"),
        (
            {"report_to": "mlflow"},
            "--report_to ('mlflow',): expected one of none, wandb, tensorboard, trackio, or several",
        ),
        ({"report_to": ()}, "--report_to is empty: give none, or trackers"),
        ({"adam_beta2": 1.0}, "--adam_beta2 1.0: must be at least 0 and below 1"),
        ({"adam_epsilon": 0.0}, "--adam_epsilon 0.0: must be above 0"),
        ({"adam_beta1": 0.5, "optim": "sgd"}, "--adam_beta1 0.5 has no effect on --optim sgd: leave it out"),
        ({"optim": "adam"}, "--optim 'adam': expected one of adamw, sgd"),
        ({"text_column_names": ["text", 1]}, "--text_column_names ('text', 1): expected a text, or several"),
        ({"checkpointing_steps": "0"}, "--checkpointing_steps '0': expected epoch, no, or a number of steps"),
        ({"checkpointing_steps": "often"}, "--checkpointing_steps 'often': expected epoch, no, or a number of steps"),
    ],
)
def test_check_refuses_a_value_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        check(Config(**changed))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("image_classification", "--color_jitter 3", "--color_jitter 3.0: must be between 0 and 1"),
        ("image_classification", "--min_crop_area 0", "--min_crop_area 0.0: must be above 0 and at most 1"),
        ("image_classification", "--hue 0.6", "--hue 0.6: must be between 0 and 0.5"),
        ("image_classification", "--rand_augment 5", "--rand_augment 5: must be between 1 and 4"),
        ("image_classification", "--rand_augment 1 --ra_magnitude 31", "--ra_magnitude 31: must be between 1 and 30"),
        ("image_classification", "--random_erasing 1.5", "--random_erasing 1.5: must be between 0 and 1"),
        ("image_classification", "--label_smoothing 1", "--label_smoothing 1.0: must be at least 0 and below 1"),
        ("image_classification", "--ema_decay 1", "--ema_decay 1.0: must be above 0 and below 1"),
        ("image_classification", "--hidden_sizes 8 0", "--hidden_sizes 8 0: must be at least 1"),
        ("image_classification", "--depths -1 1", "--depths -1 1: must be at least 1"),
        ("image_classification", "--warmup_ratio 1.5", "--warmup_ratio 1.5: must be between 0 and 1"),  # set anew
        ("mlm", "--mlm_probability 0", "--mlm_probability 0.0: must be above 0 and below 1"),
        ("mlm", "--mlm_probability 1", "--mlm_probability 1.0: must be above 0 and below 1"),
        ("mlm", "--random_replace_prob 1.5", "--random_replace_prob 1.5: must be between 0 and 1"),
        ("mlm", "--rope_theta 0", "--rope_theta 0.0: must be above 1"),
        ("nlp", "--warmup_ratio -0.1", "--warmup_ratio -0.1: must be between 0 and 1"),
        ("nlp", "--learning_rate 0", "--learning_rate 0.0: must be above 0"),
    ],
)
def test_every_recipe_knows_the_limits_of_its_numbers(recipe: str, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        parse(runs.load_recipe(recipe).Config, flags.split())


@pytest.mark.parametrize(
    ("changed", "first", "second"),
    [
        ({"warmup_steps": 0}, "--warmup_steps 0", "--warmup_ratio 0.06"),
        ({"dataset_name": "glue", "train_file": "a.csv"}, "--dataset_name glue", "--train_file a.csv"),
        ({"dataset_config_name": "mrpc"}, "--dataset_config_name mrpc", "--dataset_name"),
        ({"validation_file": "b.csv"}, "--validation_file b.csv", "--train_file"),
        ({"hub_model_id": "me/x"}, "--hub_model_id me/x", "--push_to_hub"),
        ({"early_stopping_patience": 2}, "--early_stopping_patience 2", "--metric_for_best_model"),
        ({"load_best_model_at_end": True}, "--load_best_model_at_end True", "--metric_for_best_model"),
        ({"greater_is_better": False}, "--greater_is_better False", "--metric_for_best_model"),
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
    with pytest.raises(UserError) as refusal:
        check(Config(**changed))
    message = str(refusal.value)
    assert message.startswith(first)
    assert second in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_decay": 0, "max_grad_norm": 0.0, "seed": 0, "dataloader_num_workers": 0},
        {"warmup_ratio": None, "warmup_steps": 0},
        {"warmup_ratio": 1.0},
        {"checkpointing_steps": "500"},
        {"early_stopping_patience": 1, "metric_for_best_model": "loss", "greater_is_better": False},
        {"global_batch_size": None, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
        {"micro_batches_per_step": 32, "per_device_train_batch_size": 8},
        {"push_to_hub": True},
    ],
)
def test_check_accepts(changed: dict[str, Any]) -> None:
    check(Config(**changed))


@pytest.mark.parametrize("given", [["a", "b"], ("a", "b")])
def test_python_takes_lists_where_a_field_holds_several(given: Any) -> None:
    config = Config(text_column_names=given)
    check(config)
    assert config.text_column_names == ("a", "b")
    assert Config(text_column_names="a").text_column_names == ("a",)  # type: ignore[arg-type]


# The learning rate


@pytest.mark.parametrize(
    ("recipe", "pretrained", "rate"),
    [
        ("nlp", {}, 1e-3),
        ("nlp", {"model_name_or_path": "a/model"}, 5e-5),
        ("mlm", {}, 2e-3),
        ("mlm", {"model_name_or_path": "a/model"}, 5e-5),
        ("image_classification", {}, 0.2),
        ("image_classification", {"model_name_or_path": "a/model"}, 0.01),
        ("image_classification", {"model_name_or_path": "a/model", "freeze_backbone": True}, 0.2),
        ("image_classification", {"model_name_or_path": "a/model", "from_scratch": True}, 0.2),
    ],
)
def test_the_default_learning_rate_is_that_of_new_or_of_pretrained_weights(
    recipe: str, pretrained: dict[str, Any], rate: float, tmp_path: Path
) -> None:
    made = runs.load_recipe(recipe).Config
    config = made(**pretrained)
    assert options.base_learning_rate(config) == rate
    assert options.base_learning_rate(dataclasses.replace(config, learning_rate=0.125)) == 0.125
    (tmp_path / "run.yaml").write_text("learning_rate: 0.25")
    flags = [word for name, value in pretrained.items() for word in (f"--{name}", str(value))]
    assert parse(made, [*flags, "--config", str(tmp_path / "run.yaml")]).learning_rate == 0.25
    assert parse(made, [*flags, "--learning_rate", str(made.LEARNING_RATES[0])]).learning_rate != 5e-5


# What a resumed run may change


def resumed(config: Options, **changed: Any) -> dict[str, tuple[Any, Any]]:
    """The differences between the stored `config` and the same with some settings changed."""
    return differences(stored(config), dataclasses.replace(config, **changed))


def stored(config: Options) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}


OTHER = {str: "other", int: 7, float: 0.7}


def another(name: str) -> Any:
    """A value that the field of Config does not have by default."""
    hint = command_line.kind(command_line.field_types(Config)[name])
    if name == "report_to":
        return ("wandb",)
    if hint is bool:
        return not getattr(Config(), name)
    if hint in OTHER:
        return OTHER[hint]
    if command_line.kind(hint) == tuple[str, ...]:
        return ("other",)
    return next(choice for choice in reversed(hint.__args__) if choice != getattr(Config(), name))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_a_field_decides_unless_a_set_names_it(name: str) -> None:
    changed = another(name)
    old = stored(Config())[name]
    new = list(changed) if isinstance(changed, tuple) else changed
    expected = {} if name in Config.NEVER_MATTERS else {name: (old, new)}
    if name in Config.CHOOSES_THE_MODEL - {"load_best_model_at_end", "early_stopping_patience"}:
        expected = {}
    assert resumed(Config(), **{name: changed}) == expected


def test_an_unchanged_config_has_no_differences() -> None:
    assert resumed(Config()) == {}


def test_a_setting_that_takes_several_values_takes_a_list_or_one_and_a_run_that_had_one_goes_on(tmp_path: Path) -> None:
    one = Config(text_column_names="text")  # type: ignore[arg-type]
    assert one == Config(text_column_names=["text"]) == Config(text_column_names=("text",))  # type: ignore[arg-type]
    assert differences(stored(one) | {"text_column_names": "text"}, one) == {}
    assert differences(stored(one) | {"text_column_names": "other"}, one) == {
        "text_column_names": (["other"], ["text"])
    }
    (tmp_path / "config.yaml").write_text("text_column_names: other\n")
    assert parse(Config, ["--config", str(tmp_path / "config.yaml")]).text_column_names == ("other",)


def test_differences_come_in_field_order() -> None:
    assert list(resumed(Config(), seed=1, optim="sgd", max_length=3)) == ["optim", "seed", "max_length"]


@pytest.mark.parametrize(
    "chooses", [{"load_best_model_at_end": True}, {"early_stopping_patience": 3}], ids=lambda one: next(iter(one))
)
@pytest.mark.parametrize(
    ("name", "value"), [("eval_steps", 5), ("metric_for_best_model", "f1"), ("greater_is_better", True)]
)
def test_how_to_evaluate_decides_where_evaluations_choose_the_model(chooses: dict, name: str, value: Any) -> None:
    config = Config(metric_for_best_model="accuracy", **chooses)
    assert resumed(config, **{name: value}) == {name: (getattr(config, name), value)}


@pytest.mark.parametrize("name", sorted(Options.MAY_GROW))
def test_a_run_may_grow_under_a_constant_schedule_and_never_shrink(name: str) -> None:
    constant = Config(lr_scheduler_type="constant", warmup_ratio=None, warmup_steps=5, **{name: 10})
    assert resumed(constant, **{name: 20}) == {}
    assert resumed(constant, **{name: 9}) == {name: (10, 9)}
    assert resumed(Config(**{name: 10}), **{name: 20}) == {name: (10, 20)}  # linear
    with_ratio = dataclasses.replace(constant, warmup_steps=None, warmup_ratio=0.1)
    assert resumed(with_ratio, **{name: 20}) == {name: (10, 20)}


def test_growth_does_not_hide_a_changed_schedule() -> None:
    linear = Config(warmup_ratio=None, num_train_epochs=3)
    assert resumed(linear, lr_scheduler_type="constant", num_train_epochs=5) == {
        "lr_scheduler_type": ("linear", "constant")
    }


def test_max_train_steps_cannot_be_set_or_taken_back_later() -> None:
    constant = Config(lr_scheduler_type="constant", warmup_ratio=None)
    assert resumed(constant, max_train_steps=10) == {"max_train_steps": (None, 10)}
    assert resumed(dataclasses.replace(constant, max_train_steps=10), max_train_steps=None) == {
        "max_train_steps": (10, None)
    }


def test_a_derived_global_batch_is_that_of_the_stored_run() -> None:
    asked = Config(global_batch_size=None, gradient_accumulation_steps=4, per_device_train_batch_size=8)
    derived = dataclasses.replace(asked, global_batch_size=64)
    assert differences(stored(derived), asked) == {}
    assert differences(stored(derived), derived) == {}
    assert resumed(derived, global_batch_size=128) == {"global_batch_size": (64, 128)}


def test_a_younger_field_had_its_default_and_an_unknown_one_is_a_difference() -> None:
    old = stored(Config())
    del old["max_length"]
    assert differences(old, Config()) == {}
    assert differences(old, Config(max_length=64)) == {"max_length": (128, 64)}
    assert differences({**stored(Config()), "image_size": 8}, Config()) == {"image_size": (8, None)}


def test_one_value_of_an_older_run_is_a_list_of_one(tmp_path: Path) -> None:
    chooses = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    old = stored(Config()) | chooses | {"metric_name": "accuracy"}
    assert differences(old, Config(metric_name=("accuracy",), **chooses)) == {}
    both = Config(metric_name=("accuracy", "roc_auc"), **chooses)
    assert differences(old, both) == {"metric_name": (["accuracy"], ["accuracy", "roc_auc"])}
    (tmp_path / "old.yaml").write_text("metric_name: accuracy\n")
    (tmp_path / "new.yaml").write_text("metric_name: [accuracy, roc_auc]\n")
    assert parse(Config, ["--config", str(tmp_path / "old.yaml")]).metric_name == ("accuracy",)
    assert parse(Config, ["--config", str(tmp_path / "new.yaml")]).metric_name == ("accuracy", "roc_auc")
    assert parse(Config, ["--metric_name", "accuracy", "roc_auc"]).metric_name == ("accuracy", "roc_auc")
    with pytest.raises(UserError, match="--positive_label a has no effect without --metric_name"):
        parse(Config, ["--positive_label", "a"])


# config.yaml


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of type `hint` may have."""
    kind = command_line.kind(hint)
    strategies = {str: st.text(), int: st.integers(), bool: st.booleans()}
    if kind is float:
        strategy = st.floats(allow_nan=False, allow_infinity=False)
    elif getattr(kind, "__origin__", None) is Literal:
        strategy = st.sampled_from(kind.__args__)
    elif getattr(kind, "__origin__", None) is tuple:
        strategy = st.lists(values(kind.__args__[0])).map(tuple)
    else:
        strategy = strategies[kind]
    return strategy if kind is hint else st.none() | strategy


configs = st.builds(Config, **{name: values(hint) for name, hint in command_line.field_types(Config).items()})


@given(config=configs)
@example(config=Config(run_name="None", hub_model_id="null", metric_name=("~",), output_dir="no", train_file=("",)))
@example(
    config=Config(
        run_name="1e-3", hub_model_id="0x1F", metric_name=("a: b #c", "None"), output_dir=" \n", train_file=("é\x85",)
    )
)
@example(config=Config(text_column_names=(), learning_rate=1e-300, weight_decay=1e22, output_dir="word " * 50))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_saved_config_comes_back_exactly(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "check", lambda config: None)  # any value of the right type, sensible or not
    path = tmp_path / "config.yaml"
    save(config, path)
    again = parse(Config, ["--config", str(path)])
    assert again == config
    assert [type(value) for value in vars(again).values()] == [type(value) for value in vars(config).values()]
    assert load(path) == stored(config)
    assert differences(load(path), config) == {}


def test_a_saved_config_has_a_line_for_each_field_in_order_and_no_leftovers(tmp_path: Path) -> None:
    save(Config(run_name="long " * 50), tmp_path / "config.yaml")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    names = [line.split(":")[0] for line in lines if not line.startswith("- ")]
    assert names == [field.name for field in dataclasses.fields(Config)]
    assert "checkpointing_steps: epoch" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_damaged_config_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: [1")
    with pytest.raises(UserError, match=r"config.yaml: is not valid YAML: .*line 1"):
        load(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"absent.yaml: cannot be read \(No such file or directory\)"):
        load(tmp_path / "absent.yaml")
