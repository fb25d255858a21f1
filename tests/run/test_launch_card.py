"""The launch card names settings that have no effect."""

import pytest
import runs

from shared.config import options
from shared.run.launch_card import sizes_without_effect

BERT = ["--model_name_or_path", "bert"]


@pytest.mark.parametrize(
    ("recipe", "flags", "named"),
    [
        ("nlp", [], ""),
        ("nlp", ["--hidden_size", "64"], ""),
        ("nlp", BERT, ""),
        (
            "nlp",
            ["--model_name_or_path", "bert", "--hidden_size", "64", "--vocab_size", "9"],
            "--hidden_size 64, --vocab_size 9",
        ),
        ("mlm", [*BERT, "--model_type", "bert"], "--model_type bert"),
        ("image_classification", ["--model_name_or_path", "vit", "--depths", "2", "3"], "--depths 2 3"),
    ],
)
def test_sizes_without_effect_on_a_pretrained_model_are_named(recipe, flags, named):
    config_class = runs.load_recipe(recipe).Config
    assert sizes_without_effect(options.parse(config_class, flags)) == named
