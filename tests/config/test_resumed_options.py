"""Which options may change when a run resumes; a stored config is read back unchanged."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_config import Config, stored
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs import refusal

from shared.compare import not_in_result
from shared.config import command_line, options
from shared.config.fields import Meaning, fields_with
from shared.config.options import Options, differences, load, parse, save

# What a resumed run may change


def resumed(config: Options, **changed: Any) -> dict[str, tuple[Any, Any]]:
    """The differences between the stored `config` and the same config with some settings changed."""
    return differences(stored(config), dataclasses.replace(config, **changed))


OTHER = {str: "other", int: 7, float: 0.7}


def another(name: str) -> Any:
    """A value that differs from the default of the field."""
    kind = command_line.kinds_of(Config)[name]
    if name == "report_to":
        return ("wandb",)
    if kind.is_switch:
        return not getattr(Config(), name)
    if kind.one in OTHER:
        return (OTHER[kind.one],) if kind.many else OTHER[kind.one]
    return next(choice for choice in reversed(kind.one.__args__) if choice != getattr(Config(), name))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_a_field_affects_the_result_unless_its_type_says_otherwise(name: str) -> None:
    changed = another(name)
    old = stored(Config())[name]
    new = list(changed) if isinstance(changed, tuple) else changed
    expected = {} if name in fields_with(Config, Meaning.NOT_IN_RESULT) else {name: (old, new)}
    if name in fields_with(Config, Meaning.CHOOSES_MODEL) - {"load_best_model_at_end", "early_stopping_patience"}:
        expected = {}
    assert resumed(Config(), **{name: changed}) == expected


def test_a_setting_with_several_values_accepts_a_single_one(tmp_path: Path) -> None:
    one = Config(text_column_names="text")  # type: ignore[arg-type]
    assert one == Config(text_column_names=["text"]) == Config(text_column_names=("text",))  # type: ignore[arg-type]
    (tmp_path / "config.yaml").write_text("text_column_names: other\nmetric_name: [accuracy, roc_auc]\n")
    read = parse(Config, ["--config", str(tmp_path / "config.yaml")])
    assert (read.text_column_names, read.metric_name) == (("other",), ("accuracy", "roc_auc"))
    assert "--positive_label a has no effect without --metric_name" in refusal(parse, Config, ["--positive_label", "a"])


@pytest.mark.parametrize(
    "chooses", [{"load_best_model_at_end": True}, {"early_stopping_patience": 3}], ids=lambda one: next(iter(one))
)
@pytest.mark.parametrize(
    ("name", "value"), [("eval_steps", 5), ("metric_for_best_model", "f1"), ("greater_is_better", True)]
)
def test_evaluation_settings_affect_the_result_if_evaluations_choose_the_model(
    chooses: dict, name: str, value: Any
) -> None:
    config = Config(metric_for_best_model="accuracy", **chooses)
    assert resumed(config, **{name: value}) == {name: (getattr(config, name), value)}


@pytest.mark.parametrize("name", sorted(fields_with(Options, Meaning.MAY_GROW)))
def test_a_run_may_grow_only_under_a_constant_schedule_and_must_not_shrink(name: str) -> None:
    constant = Config(lr_scheduler_type="constant", warmup_ratio=None, warmup_steps=5, **{name: 10})
    assert resumed(constant, **{name: 20}) == {}
    assert resumed(constant, **{name: 9}) == {name: (10, 9)}
    assert resumed(Config(**{name: 10}), **{name: 20}) == {name: (10, 20)}  # linear
    with_ratio = dataclasses.replace(constant, warmup_steps=None, warmup_ratio=0.1)
    assert resumed(with_ratio, **{name: 20}) == {name: (10, 20)}


def test_growth_does_not_hide_a_changed_schedule_and_max_train_steps_cannot_be_set_or_removed_later() -> None:
    linear = Config(warmup_ratio=None, num_train_epochs=3)
    grown = resumed(linear, lr_scheduler_type="constant", num_train_epochs=5)
    assert grown == {"lr_scheduler_type": ("linear", "constant")}
    constant = Config(lr_scheduler_type="constant", warmup_ratio=None)
    assert resumed(constant, max_train_steps=10) == {"max_train_steps": (None, 10)}
    ten = dataclasses.replace(constant, max_train_steps=10)
    assert resumed(ten, max_train_steps=None) == {"max_train_steps": (10, None)}


def test_a_derived_global_batch_is_taken_from_the_stored_run() -> None:
    asked = Config(global_batch_size=None, gradient_accumulation_steps=4, per_device_train_batch_size=8)
    derived = dataclasses.replace(asked, global_batch_size=64, mixed_precision="no")
    accelerator = SimpleNamespace(num_processes=1, mixed_precision="no", print=print)
    assert differences(stored(derived), asked.settled(accelerator, stored(derived))) == {}
    assert differences(stored(derived), derived) == {}
    assert resumed(derived, global_batch_size=128) == {"global_batch_size": (64, 128)}


def test_a_field_missing_in_a_stored_run_has_its_default_and_an_unknown_one_is_a_difference() -> None:
    old = stored(Config())
    del old["max_length"]
    assert differences(old, Config()) == {}
    assert differences(old, Config(max_length=64)) == {"max_length": (128, 64)}
    assert differences({**stored(Config()), "image_size": 8}, Config()) == {"image_size": (8, None)}


def test_a_saved_config_says_which_settings_do_not_affect_the_result(tmp_path: Path) -> None:
    recipe, own = tmp_path / "recipe.yaml", tmp_path / "own.yaml"
    save(Config(), recipe)
    save(Options(), own)
    assert not_in_result(own) == fields_with(Options, Meaning.NOT_IN_RESULT)
    assert {"tokenizer_processes", "report_to"} <= not_in_result(own, recipe) - not_in_result(own)


# config.yaml


def values(kind: command_line.Kind) -> st.SearchStrategy[Any]:
    """Any value that a field of this kind may have."""
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    strategies = {str: st.text(), int: st.integers(), bool: st.booleans(), float: numbers}
    strategy = strategies[kind.one] if kind.one in strategies else st.sampled_from(kind.one.__args__)
    if kind.many:
        strategy = st.lists(strategy).map(tuple)
    return st.none() | strategy if kind.optional else strategy


configs = st.builds(Config, **{name: values(kind) for name, kind in command_line.kinds_of(Config).items()})


@given(config=configs)
@example(config=Config(run_name="None", hub_model_id="null", metric_name=("~",), output_dir="no", train_file=("",)))
@example(
    config=Config(
        run_name="1e-3", hub_model_id="0x1F", metric_name=("a: b #c", "None"), output_dir=" \n", train_file=("é\x85",)
    )
)
@example(config=Config(text_column_names=(), learning_rate=1e-300, weight_decay=1e22, output_dir="word " * 50))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_saved_config_is_read_back_exactly(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "check", lambda config: None)  # any value of the right type, sensible or not
    path = tmp_path / "config.yaml"
    save(config, path)
    again = parse(Config, ["--config", str(path)])
    assert again == config
    assert [type(value) for value in vars(again).values()] == [type(value) for value in vars(config).values()]
    assert load(path) == stored(config)
    assert differences(load(path), config) == {}


def test_a_saved_config_has_a_line_for_each_field_in_order_and_no_other_file_remains(tmp_path: Path) -> None:
    save(Config(run_name="long " * 50), tmp_path / "config.yaml")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    names = [line.split(":")[0] for line in lines if not line.startswith(("#", "- "))]
    assert names == [field.name for field in dataclasses.fields(Config)]
    assert "checkpointing_steps: epoch" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
