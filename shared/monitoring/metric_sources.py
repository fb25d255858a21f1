"""Where metrics come from: the shipped ones, files of the user, and the Hub."""

import atexit
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.compat import of_evaluate
from shared.errors import UserError
from shared.monitoring import metric_functions
from shared.processes import exit_reasons

METRICS_FOLDER = Path(__file__).resolve().parent / "metrics"
# The metrics of each kind of task; the first decides which checkpoint is best.
DEFAULT_METRICS = {
    "classification": ("accuracy", "macro_f1", "matthews_correlation"),
    "image_classification": ("accuracy", "top_5_accuracy", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "accuracy"),
    "regression": ("pearson", "spearman", "mean_squared_error"),
}
OF_CLASS = ("precision_of_class", "recall_of_class", "f1_of_class")  # metrics of --positive_label
RANKED = ("top_5_accuracy",)  # metrics that take the best classes of each sample, not the best one only
SCORED = ("roc_auc",)  # metrics that take the probabilities of all classes
ON_REQUEST = {kind: () if kind == "regression" else (*OF_CLASS, *SCORED) for kind in DEFAULT_METRICS}


def shipped_name(given: str) -> str:
    """The name of the shipped metric that a name, a folder or a file refers to; "" for any other metric."""
    known = {name for table in (DEFAULT_METRICS, ON_REQUEST) for names in table.values() for name in names}
    if given in known:
        return given
    path = Path(given).expanduser().resolve()
    folder = path.parent if path.suffix == ".py" else path
    return folder.name if folder.parent == METRICS_FOLDER and folder.name in known else ""


def has_evaluate() -> bool:
    """Whether the `evaluate` library is installed, and `datasets`, which it imports."""
    return None not in map(find_spec, ("evaluate", "datasets"))


def find_source(kind: str, metric_name: str, trust_remote_code: bool) -> str:
    """The argument of evaluate.load for --metric_name `metric_name`: a file, or a name on the Hub.

    Raises:
        UserError: the metric does not exist, does not fit `kind` of task, needs `evaluate`, which is not installed, or
            is code from the Hub without --trust_remote_code.
    """
    if metric_name in (*DEFAULT_METRICS[kind], *ON_REQUEST[kind]):
        return str(METRICS_FOLDER / metric_name / f"{metric_name}.py")
    there = {folder.name for folder in METRICS_FOLDER.iterdir() if (folder / f"{folder.name}.py").is_file()}
    added = {name for name in there if has_evaluate() and not shipped_name(name)}
    fitting = ", ".join((*DEFAULT_METRICS[kind], *ON_REQUEST[kind], *sorted(added)))
    if shipped_name(metric_name):
        raise UserError(f"--metric_name {metric_name} does not fit {kind}: use one of {fitting}")
    if not has_evaluate():
        raise UserError(
            f"--metric_name {metric_name}: a metric other than {fitting} needs `evaluate`, which is not installed: "
            "pip install evaluate"
        )
    given = Path(metric_name).expanduser()
    for path in (METRICS_FOLDER / metric_name, given):
        for script in (path / f"{path.resolve().name}.py", path):
            if script.suffix == ".py" and script.is_file():
                return str(script.resolve())
    if given.exists() or given.suffix == ".py" or metric_name.startswith((".", "/", "~")):
        raise UserError(
            f"--metric_name {metric_name}: no metric there; give a .py file, a folder NAME with NAME.py in it, or one "
            f"of {fitting}"
        )
    if not trust_remote_code:
        raise UserError(
            f"--metric_name {metric_name} is not one of {fitting}, nor a file or folder here; a metric from the Hub is "
            "code that will run on this machine: add --trust_remote_code to allow it"
        )
    if (cached := cached_hub_script(metric_name)) is None:
        from shared.launch.hub import require_hub

        require_hub("--metric_name", metric_name)
    return cached or metric_name


def cached_hub_script(name: str) -> str | None:
    """The newest copy of a Hub metric in the cache of `evaluate`, which needs no network; None if there is none."""
    return max(map(str, of_evaluate.cached_scripts(name)), key=os.path.getmtime, default=None)


def compute_function(source: str, multi_label: bool) -> Callable[..., dict[str, float]]:
    """The function of keywords `predictions`, `references` and `pos_label` that computes the metric at `source`.

    It is the `compute` of an `evaluate.Metric`. Where `evaluate` is not installed, `source` is a shipped metric, and
    the function that this metric's module calls is called directly.
    """
    if has_evaluate():
        # Rows of 0 and 1 have the name that evaluate's own accuracy and f1 have for them.
        compute: Callable[..., dict[str, float]] = load(source, "multilabel" if multi_label else None).compute
        return compute
    name = shipped_name(source)
    return lambda **given: {name: getattr(metric_functions, name)(**given)}


def load(source: str, config_name: str | None) -> Any:
    """An `evaluate.Metric` that keeps its rows in memory, so that it shares no file or lock with another run.

    `evaluate` imports a copy of the file from a cache in the user's home. That folder may be read-only, or contain
    locks of another user. So the copy of a local file goes to a temporary folder of this process, unless the process
    has already imported metrics from elsewhere.
    """
    import evaluate

    if not Path(source).is_file():
        return evaluate.load(source, config_name=config_name, module_type="metric", keep_in_memory=True)
    if not of_evaluate.has_imported_scripts():
        copies = tempfile.mkdtemp(prefix="evaluate-")
        exit_reasons.temporary.append(Path(copies))
        atexit.register(exit_reasons.clean_up)
        of_evaluate.use_modules_cache(copies)
    with tempfile.TemporaryDirectory() as unused:  # evaluate creates a folder for rows even if it keeps them in memory
        return evaluate.load(
            source, config_name=config_name, module_type="metric", keep_in_memory=True, cache_dir=unused
        )
