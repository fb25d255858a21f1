"""Metrics of `evaluate`: files of the user, and the Hub; a metric that cannot be used is refused before training."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resolved_metrics import resolve
from runs import refusal

from shared.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`evaluate` writes nothing to the user's home. One folder for all, as Python looks for a package in one place."""
    import evaluate

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE"):
            patch.setattr(evaluate.config, name, tmp_path_factory.getbasetemp() / name)
        yield


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
    assert metrics.names == ("binary_f1",)
    assert metrics.compute(np.array([0, 1, 1]), np.array([0, 1, 0])) == {"binary_f1": pytest.approx(2 / 3)}
    assert "cannot be computed for classification " in refusal(metrics.compute, *np.array([[0, 1, 2]] * 2))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("", "", "cannot be computed for classification with 5 labels: Target is mul"),
        ("def _compute", "def _compute(", "parenthesized"),
        ("f1_score(references, predictions)", "[0.5]", "not 'list'"),
        ('"binary_f1": f1_score(references, predictions)', '"loss": 1.0', "eval_loss would be computed twice"),
        ("import datasets\n", "import datasets\nimport no_such_package\n", "no_such_package"),
    ],
)
def test_a_broken_metric_of_the_user_is_refused_with_the_reason(
    own_metric: Path, old: str, new: str, reason: str
) -> None:
    (own_metric / "own.py").write_text(OWN_METRIC.replace(old, new))
    message = refusal(resolve, "classification", str(own_metric), classes=5)
    assert str(own_metric) in message
    assert reason in message


def test_a_metric_of_the_hub_is_loaded_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    metric = SimpleNamespace(compute=lambda predictions, references: {"f1": 1.0})
    monkeypatch.setattr(evaluate, "load", lambda source, **_: metric if source == "me/f1" else None)
    assert resolve("classification", "me/f1", trust_remote_code=True).names == ("f1",)


def test_without_the_hub_the_error_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("reached the network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"--metric_name no_such_metric cannot be computed .*: Couldn't"):
        resolve("classification", "no_such_metric", trust_remote_code=True)
