"""Undocumented names of `evaluate`: where it keeps the scripts of metrics."""

import os
import sys
from pathlib import Path
from typing import Any

MODULES = "evaluate_modules"  # the package that evaluate makes of the scripts, and its folder


def modules_cache() -> Path:
    """`evaluate.config.HF_MODULES_CACHE`: the folder of scripts; without that name, the folder that is documented."""
    import evaluate

    default = os.environ.get("HF_MODULES_CACHE", "~/.cache/huggingface/modules")
    return Path(getattr(_config(evaluate), "HF_MODULES_CACHE", default)).expanduser()


def use_modules_cache(folder: str) -> None:
    """Set `evaluate.config.HF_MODULES_CACHE`; without that name, scripts stay in the folder of the user."""
    import evaluate

    if hasattr(_config(evaluate), "HF_MODULES_CACHE"):
        _config(evaluate).HF_MODULES_CACHE = folder


def has_imported_scripts() -> bool:
    """Whether this process has imported a metric's script. After that, another folder has no effect."""
    return MODULES in sys.modules


def cached_scripts(name: str) -> list[Path]:
    """The copies of the script of a metric of the Hub, NAME or OWNER/NAME: a layout of folders of `evaluate`'s own."""
    owner, _, metric = name.rpartition("/")
    metrics = modules_cache() / MODULES / "metrics"
    return list(metrics.glob(f"{owner or 'evaluate-metric'}--{metric}/*/{metric}.py"))


def _config(evaluate: Any) -> Any:
    return getattr(evaluate, "config", None)
