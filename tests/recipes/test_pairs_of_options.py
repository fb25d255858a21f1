"""Options that never met: each pair of values of a recipe's options trains, or is refused in one line.

A run has many options that are not the default, so few runs contain all pairs. If a run is refused, it is started again
without the options that the error names. `make campaign` trains with all pairs, `make test` with the most of them that
fit into a few runs.
"""

import dataclasses
import itertools
import random
import re
import shlex
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import runs
import torch
import toy_data
from accelerate.state import AcceleratorState

from shared.config import command_line, options
from shared.config.options import Options
from shared.errors import UserError
from shared.processes import folder_lock

RECIPES = sorted(path.stem for path in (runs.ROOT / "recipes").glob("*.py"))
FEW = 2  # runs of a recipe in `make test`

# Flags of the values of each option that is neither a switch nor a choice. The first flag is that of the option.
VALUES = """
--csv_delimiter , | --validation_split_percentage 30 | --max_train_samples 50
--max_eval_samples 20 | --dataloader_num_workers 1
--gradient_accumulation_steps 2 --per_device_train_batch_size 6
--per_device_train_batch_size 4 | --micro_batches_per_step 3
--max_tokens_per_micro_batch None | --learning_rate 0.01 | --adam_beta1 0.8 | --adam_beta2 0.9
--adam_epsilon 1e-6 | --weight_decay 0
--decay_ratio 0.5 --lr_scheduler_type warmup_stable_decay | --warmup_steps 1
--layer_lr_decay 0.8 | --freeze embeddings | --freeze *.bias | --max_grad_norm 0
--checkpointing_steps 1 | --checkpointing_steps no | --save_total_limit None | --eval_steps 1
--metric_for_best_model loss | --load_best_model_at_end --metric_for_best_model loss
--early_stopping_patience 1 --metric_for_best_model loss | --profile 1 | --expect_processes 1
--intermediate_size 40 | --rope_theta 500 | --lora_rank 2
--lora_rank 2 --lora_targets query --lora_alpha 2 --lora_dropout 0.1 | --stride 8
--matryoshka_dims 16 8 | --kept_micro_batches 2 | --temperature 0.5 | --class_weights balanced
--label_smoothing 0.1 | --label_smoothing_factor 0.1 | --mlm_probability 0.5
--random_replace_prob 0 | --ema_decay 0.9 | --decode_size 20 | --mixup 0.2 | --cutmix 1
--hue 0.1 | --min_crop_area 1 | --random_erasing 0.5 | --rand_augment 2
--ra_magnitude 5 --rand_augment 2 | --resize_size 20 | --train_image_size 12
--repeated_augmentation 2 | --stochastic_depth 0.3
"""
# Switches that need a GPU or the network, or compile for minutes; and those that the flags of others contain.
NOT_HERE = {"torch_compile", "push_to_hub", "sync_batchnorm", "cudnn_benchmark"}
NOT_HERE |= {"dry_run", "report_to", "load_best_model_at_end", "greater_is_better", "problem_type"}
SIZES = [*runs.TINY[:10], "--max_tokens_per_micro_batch", "200", "--global_batch_size", "12"]
IMAGES = [*runs.TINY_IMAGES[:9], "--per_device_train_batch_size", "12"]


def values_of(config_class: type[Options], name: str) -> list[str]:
    """The flags of the values of an option that are not its default."""
    if found := [flags for flags in re.split(r" \| |\n", VALUES) if flags.split()[:1] == [f"--{name}"]]:
        return found
    kind, default = command_line.kinds_of(config_class)[name], getattr(config_class(), name)
    if name in NOT_HERE:
        return []
    if kind.is_switch:
        return [f"--{'no_' * default}{name}"]
    choices = () if kind.many else get_args(kind.one)
    return [f"--{name} {choice}" for choice in choices if choice != default]


def factors_of(config_class: type[Options], **more: list[str]) -> dict[str, list[str]]:
    """The options with their values as flags, "" for the default first."""
    found = {field.name: values_of(config_class, field.name) for field in dataclasses.fields(config_class)}
    return more | {name: ["", *values] for name, values in found.items() if values}


def rows_of(factors: dict[str, list[str]], fits: Callable[[dict[str, str]], bool]) -> Iterator[dict[str, str]]:
    """Few choices of a value for each option which contain each pair of values that `fits` a run.

    Each takes the values with the most pairs that no choice before it contains.
    """
    draw = random.Random(0)
    values = {name: [(name, value) for value in factors[name]] for name in factors}
    pairs = {
        frozenset(both): None
        for one, other in itertools.combinations(factors, 2)
        for both in itertools.product(values[one], values[other])
    }
    while pairs:
        row = dict(sorted(next(iter(pairs))))
        pairs.pop(frozenset(row.items()))
        if not fits(row):
            continue
        for name in draw.sample([*factors], len(factors)):
            if name not in row:
                found = draw.sample(values[name], len(values[name]))
                found.sort(key=lambda one: sum(frozenset([one, other]) in pairs for other in row.items()), reverse=True)
                row[name] = next(value for _, value in found if value == "" or fits(row | {name: value}))
        for both in itertools.combinations(row.items(), 2):
            pairs.pop(frozenset(both), None)
        yield row


def words_of(row: dict[str, str]) -> list[str]:
    """The command line of a choice of values."""
    return [word for flags in row.values() for word in shlex.split(flags)]


@pytest.fixture(scope="module")
def folders(texts, tmp_path_factory):
    """The data and the pretrained models of each recipe: {recipe: {"data": [flags, ...], "model": [flags, ...]}}."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for recipe in RECIPES:
        (folder / recipe).mkdir()
        if recipe == "image_classification":
            train(runs.load_recipe(recipe), {}, folder / recipe)
            found[recipe] = {"data": [""], "model": ["", f"--model_name_or_path {folder}/{recipe}/0/model"]}
            continue
        data = toy_data.write_data(recipe, texts, folder / recipe)
        base = folder / recipe / "base"
        if recipe in toy_data.RECIPES[1:]:
            toy_data.write_encoder_with_dropout(base, recipe, data)
        else:
            base = runs.write_bert_with_dropout(base, texts)
        lines = [shlex.join(map(str, data))]
        if recipe == "nlp":
            lines += [with_labels(texts, folder, kind) for kind in ("regression", "multi_label")]
        found[recipe] = {"data": lines, "model": ["", f"--model_name_or_path {base}"]}
    return found


def with_labels(texts, folder, kind: str) -> str:
    """The flags of the texts of `texts` with numbers as labels, or with several labels of each text."""
    flags, labels = [], ("1.5", "4.5") if kind == "regression" else ("a", "a;b")
    for flag, file in zip(texts[::2], texts[1::2], strict=True):
        heading, *lines = file.read_text().splitlines()
        path = folder / f"{kind}-{file.name}"
        rows = [f"{line.rpartition(',')[0]},{labels[i % 2]}" for i, line in enumerate(lines)]
        path.write_text("\n".join([heading, *rows]) + "\n")
        flags += [flag, str(path)]
    return shlex.join([*flags, *(["--label_delimiter", ";"] if kind == "multi_label" else [])])


def train(module, row: dict[str, str], output) -> None:
    """Train with a choice of values for two steps, without each option because of which the recipe refuses to."""
    for attempt in itertools.count():
        words = [*(IMAGES if hasattr(module.Config, "train_dir") else SIZES), "--max_train_steps", "2", *words_of(row)]
        try:
            runs.train(module, output / str(attempt), *words)
            return
        except UserError as error:
            flags = set(re.findall(r"--\w+", str(error)))
            named = {name for name in row if name != "data" and not flags.isdisjoint(row[name].split())}
            if not named:
                raise AssertionError(f"{error}: {shlex.join(words)}") from error
            row = row | dict.fromkeys(named - {"model"} or named, "")
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {shlex.join(words)}") from error
        finally:
            folder_lock.release_all()
            AcceleratorState._reset_state(reset_partial_state=True)
            torch.use_deterministic_algorithms(False)


def choices(module, found: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """The choices of values for the runs of a recipe."""

    def fits(row: dict[str, str]) -> bool:
        try:
            options.parse(module.Config, words_of({"data": found["data"][0]} | row))
        except UserError:
            return False
        return True

    return rows_of(factors_of(module.Config, **found), fits)


@pytest.mark.parametrize("most", [FEW, pytest.param(None, marks=pytest.mark.campaign)], ids=["few", "each"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pairs_of_options_train_or_are_refused_in_one_line(recipe, most, folders, tmp_path):
    module, failed = runs.load_recipe(recipe), []
    for number, row in enumerate(itertools.islice(choices(module, folders[recipe]), most)):
        try:
            train(module, row, tmp_path / str(number))
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)
