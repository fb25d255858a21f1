"""Settings that recipes had in an earlier version, which a config.yaml of that version still has."""

from collections.abc import Container, Mapping
from typing import Any

REMOVED = {"fused_qkv": "false", "image_decoder": "pillow", "attention": "none", "fixed_shapes": "false"}
"""Settings that no recipe has any more, with their default in lower case."""

FORMER_DEFAULTS = REMOVED | {
    # A recipe of one's own has these only if it inherits them from shared/options.
    **dict.fromkeys(("dataset_name", "dataset_config_name", "train_split_name", "validation_split_name"), "none"),
    **dict.fromkeys(
        ("train_file", "validation_file", "csv_delimiter", "max_train_samples", "max_eval_samples"), "none"
    ),
    **dict.fromkeys(("peak_tflops", "profile", "hub_model_id"), "none"),
    **dict.fromkeys(("skip_incomplete_rows", "auto_micro_batch", "push_to_hub"), "false"),
    **{"validation_split_percentage": "10", "gradient_compression": "none", "report_to": "['none']"},
}
"""All settings that a recipe may lack today. A run that had the default is the same run without the setting."""


def without_removed(settings: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """Return stored `settings` without those that are none of the recipe's `fields` and had their former default."""
    return {
        name: value
        for name, value in settings.items()
        if name in fields or FORMER_DEFAULTS.get(name) != str(value).lower()
    }
