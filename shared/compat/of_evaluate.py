"""Undocumented names of `evaluate`: the folders of its metric scripts."""

import os
import sys
from pathlib import Path
from typing import Any

MODULES = "evaluate_modules"  # the package in which evaluate puts the scripts, and the name of its folder


def modules_cache() -> Path:
    """`evaluate.config.HF_MODULES_CACHE`: the folder of the scripts; if that name is missing, the documented folder."""
    import evaluate

    default = os.environ.get("HF_MODULES_CACHE", "~/.cache/huggingface/modules")
    return Path(getattr(_config(evaluate), "HF_MODULES_CACHE", default)).expanduser()


def use_modules_cache(folder: str) -> None:
    """Set `evaluate.config.HF_MODULES_CACHE`; if that name is missing, scripts stay in the user's folder.

    evaluate appends the folder to `sys.path`. A process that multiprocessing started has the path of its parent, where
    the parent's folder of scripts may come first, so this function puts the new one in front.
    """
    import evaluate

    if hasattr(_config(evaluate), "HF_MODULES_CACHE"):
        _config(evaluate).HF_MODULES_CACHE = folder
        sys.path.insert(0, folder)


def has_imported_scripts() -> bool:
    """Whether this process has imported a metric's script. After that, another folder has no effect."""
    return MODULES in sys.modules


def cached_scripts(name: str) -> list[Path]:
    """The cached copies of the script of a Hub metric, NAME or OWNER/NAME; the folder layout is undocumented."""
    owner, _, metric = name.rpartition("/")
    metrics = modules_cache() / MODULES / "metrics"
    return list(metrics.glob(f"{owner or 'evaluate-metric'}--{metric}/*/{metric}.py"))


def _config(evaluate: Any) -> Any:
    return getattr(evaluate, "config", None)
