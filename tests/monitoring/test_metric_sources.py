"""Sources of metrics: the recipes, files of the user, and the Hub; a metric that cannot be used is refused."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from resolved_metrics import resolve

from shared.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("classification", "pearson", "does not fit classification: use one of accuracy, macro_f1"),
        ("regression", "accuracy", "does not fit regression: use one of pearson"),
        ("classification", "acuracy", "not one of accuracy, macro_f1, matthews_correlation"),
        ("classification", "f1", "add --trust_remote_code"),
        ("classification", "someone/metric", "add --trust_remote_code"),
        ("classification", "./missing", "no metric there"),
        ("classification", "missing.py", "no metric there"),
        ("classification", str(ROOT / "shared"), "no metric there"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_before_training(kind: str, name: str, expected: str) -> None:
    with pytest.raises(UserError, match="--metric_name") as refused:
        resolve(kind, name)
    assert expected in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


OWN_METRIC = """
import datasets
import evaluate
from sklearn.metrics import f1_score


class Own(evaluate.Metric):
    def _info(self):
        value = datasets.Value("int64")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"binary_f1": f1_score(references, predictions)}
"""


@pytest.fixture
def own_metric(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text(OWN_METRIC)
    return tmp_path / "own"


@pytest.mark.parametrize("inside", ["", "own.py"])
def test_a_users_own_folder_or_file_can_be_a_metric(own_metric: Path, inside: str) -> None:
    metrics = resolve("classification", str(own_metric / inside))
    assert metrics.main_name == "binary_f1"
    assert metrics.compute(np.array([0, 1, 1]), np.array([0, 1, 0])) == {"binary_f1": pytest.approx(2 / 3)}


def test_a_metric_that_fails_for_this_many_classes_is_refused_before_training(own_metric: Path) -> None:
    with pytest.raises(
        UserError, match="cannot be computed for classification with 5 labels: ValueError: Target is mul"
    ):
        resolve("classification", str(own_metric), classes=5)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("import evaluate\n", "import evaluate\nfrom evaluate import Metric\n", "write `import evaluate`, not `from"),
        ("def _compute", "def _compute(", "SyntaxError"),
        ("f1_score(references, predictions)", "[0.5]", "TypeError"),
        ("import datasets\n", "import datasets\nimport no_such_package\n", "no_such_package"),
    ],
)
def test_a_broken_metric_of_the_user_is_refused_with_the_reason(
    own_metric: Path, old: str, new: str, reason: str
) -> None:
    (own_metric / "own.py").write_text(OWN_METRIC.replace(old, new))
    with pytest.raises(UserError) as refused:
        resolve("classification", str(own_metric))
    assert str(own_metric) in str(refused.value)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A stand-in for the Hub that can be unreachable, and the sources with which evaluate.load was called."""
    import evaluate

    from shared.launch import hub

    state = SimpleNamespace(reachable=True, loaded=[], cache=tmp_path / "modules")

    def require_hub(flag: str, value: str) -> None:
        if not state.reachable:
            raise UserError(f"{flag} {value}: the Hub cannot be reached")

    def load(source: str, **_: Any) -> Any:
        state.loaded.append(source)
        return SimpleNamespace(compute=lambda predictions, references: {"f1": 1.0})

    monkeypatch.setattr(hub, "require_hub", require_hub)
    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", state.cache)
    return state


def test_a_metric_of_the_hub_is_loaded_before_training(hub: SimpleNamespace) -> None:
    metrics = resolve("classification", "f1", trust_remote_code=True)
    assert hub.loaded == ["f1"]
    assert metrics.main_name == "f1"


def test_without_the_hub_the_error_names_the_flag_and_nothing_is_loaded(hub: SimpleNamespace) -> None:
    hub.reachable = False
    with pytest.raises(UserError, match="--metric_name f1: the Hub cannot be reached"):
        resolve("classification", "f1", trust_remote_code=True)
    assert hub.loaded == []


@pytest.mark.parametrize(("name", "folder"), [("f1", "evaluate-metric--f1"), ("me/f1", "me--f1")])
def test_a_metric_in_the_cache_needs_no_hub(hub: SimpleNamespace, name: str, folder: str) -> None:
    hub.reachable = False
    for age, digest in enumerate(["newest", "older"]):
        script = hub.cache / "evaluate_modules" / "metrics" / folder / digest / "f1.py"
        script.parent.mkdir(parents=True)
        script.touch()
        os.utime(script, (1e9 - age, 1e9 - age))
    resolve("classification", name, trust_remote_code=True)
    assert [Path(source).parent.name for source in hub.loaded] == ["newest"]


FRESH_PROCESS = """
import socket
import sys

def refuse(*_):
    raise OSError("no network")

socket.socket.connect = refuse
import numpy as np
from shared.config.options import Options
from shared.monitoring import evaluation

names, targets = ("a", "b"), np.array([0, 1])
metrics = evaluation.resolve(Options(), "classification", names, targets)
evaluation.resolve(Options(metric_name=("micro_f1", "roc_auc")), "multi_label", names, np.eye(2))
slow = {"evaluate", "datasets", "sklearn"} & set(sys.modules)
assert not slow, slow

class WithoutTransformers:  # evaluate works without transformers and starts seconds sooner
    def find_spec(self, name, *_):
        if name == "transformers":
            raise ImportError(name)

sys.meta_path.insert(0, WithoutTransformers())
print(metrics.compute(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])))
"""


@pytest.mark.docs  # it starts a process without the modules of the others
def test_in_a_fresh_process_resolving_imports_nothing_slow_and_computing_needs_no_network_and_no_home(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "home")  # a path below a file cannot be created, not even by root
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": nowhere, "HF_HOME": nowhere, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'accuracy': 0.75" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # and no temporary files are left


@pytest.mark.docs  # it starts a process for a rare case
def test_a_metric_loads_even_if_sys_path_has_another_folder_evaluate_modules(tmp_path: Path) -> None:
    (tmp_path / "evaluate_modules/metrics").mkdir(parents=True)
    for folder in ("evaluate_modules", "evaluate_modules/metrics"):
        (tmp_path / folder / "__init__.py").touch()
    script = f"""
import sys
sys.path.append({str(tmp_path)!r})
from shared.monitoring.metric_sources import METRICS_FOLDER, load
print(load(str(METRICS_FOLDER / "roc_auc/roc_auc.py"), None).name)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "roc_auc", done.stderr[-2000:]
