"""Where metrics come from: those that come with the recipes, files of the user's own, and the Hub."""

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

from shared.compat import of_evaluate
from shared.errors import UserError
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
    """The name of the metric that comes with the recipes and is meant by a name, a folder or a file; "" for others."""
    known = {name for table in (DEFAULT_METRICS, ON_REQUEST) for names in table.values() for name in names}
    if given in known:
        return given
    path = Path(given).expanduser().resolve()
    folder = path.parent if path.suffix == ".py" else path
    return folder.name if folder.parent == METRICS_FOLDER and folder.name in known else ""


def find_source(kind: str, metric_name: str, trust_remote_code: bool) -> str:
    """What evaluate.load is given for --metric_name `metric_name`: a file, or a name on the Hub.

    Raises:
        UserError: there is no such metric, it does not fit `kind` of task, or would be code from the Hub without
            --trust_remote_code.
    """
    if metric_name in (*DEFAULT_METRICS[kind], *ON_REQUEST[kind]):
        return str(METRICS_FOLDER / metric_name / f"{metric_name}.py")
    there = {folder.name for folder in METRICS_FOLDER.iterdir() if (folder / f"{folder.name}.py").is_file()}
    added = {name for name in there if not shipped_name(name)}
    fitting = ", ".join((*DEFAULT_METRICS[kind], *ON_REQUEST[kind], *sorted(added)))
    if shipped_name(metric_name):
        raise UserError(f"--metric_name {metric_name} does not fit {kind}: use one of {fitting}")
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
        from shared.pretrained.hub import require_hub

        require_hub("--metric_name", metric_name)
    return cached or metric_name


def cached_hub_script(name: str) -> str | None:
    """The newest copy of a Hub metric that `evaluate` kept on this machine: it needs no network."""
    return max(map(str, of_evaluate.cached_scripts(name)), key=os.path.getmtime, default=None)


def load(source: str, config_name: str | None) -> Any:
    """An `evaluate.Metric` that keeps its rows in memory and so shares no file or lock with another run.

    `evaluate` imports a copy of the file from a cache in the user's home. That may be read-only, or hold another user's
    locks; for a local file the copy goes to a temporary folder of this process instead, unless the process has already
    imported metrics from elsewhere.
    """
    import evaluate

    if not Path(source).is_file():
        return evaluate.load(source, config_name=config_name, module_type="metric", keep_in_memory=True)
    if not of_evaluate.has_imported_scripts():
        copies = tempfile.mkdtemp(prefix="evaluate-")
        exit_reasons.temporary.append(Path(copies))
        atexit.register(exit_reasons.clean_up)
        of_evaluate.use_modules_cache(copies)
    with tempfile.TemporaryDirectory() as unused:  # it makes a folder for rows even where it keeps them in memory
        return evaluate.load(
            source, config_name=config_name, module_type="metric", keep_in_memory=True, cache_dir=unused
        )
