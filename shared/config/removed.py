"""Settings that were removed, which a config.yaml of an earlier version still has."""

from collections.abc import Mapping
from typing import Any

FORMER_DEFAULTS = {"fused_qkv": "false", "image_decoder": "pillow"}
"""The default of each, in lower case. A run that had it is the same run without the setting."""


def without_removed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored `settings` without the removed ones that had their default; the others of them stay."""
    return {name: value for name, value in settings.items() if FORMER_DEFAULTS.get(name) != str(value).lower()}
