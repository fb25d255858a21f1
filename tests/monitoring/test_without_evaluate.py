"""Without the `evaluate` library, the metrics of the recipes have the same values, and other metrics are refused."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from shared.config.options import Options
from shared.errors import UserError
from shared.monitoring import evaluation
from shared.monitoring.metric_sources import DEFAULT_METRICS, ON_REQUEST

ROOT = Path(__file__).parents[2]
LIBRARIES = ("evaluate", "datasets")
SHIPPED = [(kind, name) for table in (DEFAULT_METRICS, ON_REQUEST) for kind in table for name in table[kind]]
ROWS, CLASSES = 211, 7


def hide(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """Make `libraries` look as if they were not installed in this process."""
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)


def resolve(kind: str, name: str, targets: np.ndarray, trust_remote_code: bool = False) -> evaluation.Metrics:
    names = () if kind == "regression" else tuple("abcdefg")
    about = {"positive_label": "c"} if name in evaluation.OF_CLASS else {}
    config = Options(metric_name=(name,), trust_remote_code=trust_remote_code, **about)
    return evaluation.resolve(config, kind, names, targets)


def data(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions in the shape that recipes gather, references, and probabilities; they agree in part."""
    random = np.random.default_rng(5)
    scores = random.random((ROWS, CLASSES), np.float32)
    if kind == "regression":
        references = random.normal(size=ROWS)
        return references + random.normal(size=ROWS), references.astype(np.float32), scores
    if kind == "multi_label":
        references = random.integers(0, 2, (ROWS, CLASSES))
        kept = random.random((ROWS, CLASSES)) < 0.7
        return np.where(kept, references, 1 - references).astype(np.float64), references, scores
    references = random.integers(0, CLASSES, ROWS)
    ranked = np.argsort(-(scores + 0.2 * np.eye(CLASSES)[references]), axis=1).astype(np.float64)
    return ranked if kind == "image_classification" else ranked[:, 0], references, scores


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_a_shipped_metric_has_the_same_bits_without_evaluate(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictions, references, scores = data(kind)
    with_library = resolve(kind, name, references)
    assert "metrics" not in with_library.notes
    expected = with_library.compute(predictions, references, scores)
    hide(monkeypatch, *LIBRARIES)
    values = resolve(kind, name, references).compute(predictions, references, scores)
    assert values == expected
    assert not np.isnan(values[name])
    assert abs(values[name]) not in {0.0, 1.0}, "values at a limit would hide a difference"


@pytest.mark.parametrize("missing", LIBRARIES)
@pytest.mark.parametrize("name", ["f1", "accurracy", __file__, str(ROOT / "shared")])
def test_any_other_metric_is_refused_and_the_error_names_the_package_to_install(
    missing: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, missing)
    with pytest.raises(UserError) as refused:
        resolve("classification", name, np.arange(CLASSES), trust_remote_code=True)
    message = str(refused.value)
    assert message.startswith(f"--metric_name {name}: a metric other than accuracy, ")
    assert message.endswith("needs `evaluate`, which is not installed: pip install evaluate")
    assert "\n" not in message


WITHOUT = """
import runpy, sys
sys.modules |= {"evaluate": None, "datasets": None}
assert not any(name.startswith(("shared.datasets", "shared.text")) for name in sys.modules), "imported before"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_evaluate_and_datasets_a_run_has_the_same_scores_and_a_row_in_its_launch_card(
    texts: list[Any], alone: Path, tmp_path: Path
) -> None:
    flags = [*runs.TINY, *map(str, texts), "--output_dir", str(tmp_path / "run")]
    (tmp_path / "without.py").write_text(WITHOUT)
    words = [runs.ROOT / "recipes/nlp.py", *flags]
    (code,), printed = runs.run_forked(1, tmp_path / "without.py", words, tmp_path, ACCELERATE_USE_CPU="true")
    assert code == 0, printed
    (row,) = [line for line in printed.splitlines() if "`evaluate` is not installed" in line]
    assert row.split()[0] == "metrics"
    scores = [
        [line[name] for line in runs.metrics(output) for name in ("eval_accuracy", "eval_macro_f1") if name in line]
        for output in (alone, tmp_path / "run")
    ]
    assert scores[0]
    assert scores[0] == scores[1]
