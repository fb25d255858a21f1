"""The installed evaluate has the undocumented names that we use."""

import sys
from pathlib import Path

import evaluate
import pytest

from shared.compat import of_evaluate
from shared.monitoring.metric_sources import METRICS_FOLDER

EVALUATE = f"evaluate {evaluate.__version__}"


@pytest.fixture
def no_scripts_imported(monkeypatch):
    """During the test, modules of the package of scripts that this process has imported are removed."""

    def take_out():
        names = [name for name in sys.modules if name.partition(".")[0] == of_evaluate.MODULES]
        return {name: sys.modules.pop(name) for name in names}

    before = take_out()
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    take_out()
    sys.modules.update(before)


def test_scripts_are_written_to_the_configured_folder(tmp_path, monkeypatch, no_scripts_imported):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", "/elsewhere")
    metric, rows = METRICS_FOLDER / "accuracy" / "accuracy.py", tmp_path / "rows"
    assert not of_evaluate.has_imported_scripts()
    of_evaluate.use_modules_cache(str(tmp_path / "cache"))
    evaluate.load(str(metric), config_name="multiclass", cache_dir=str(rows), keep_in_memory=True)
    assert of_evaluate.has_imported_scripts(), f"{EVALUATE}: the package of scripts is not called {of_evaluate.MODULES}"
    assert list((tmp_path / "cache" / of_evaluate.MODULES).rglob("accuracy.py")), (
        f"{EVALUATE}: evaluate.config.HF_MODULES_CACHE is not read; used to keep scripts out of the user's home"
    )


def test_without_the_undocumented_name_the_folder_comes_from_the_documented_variable(monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", "/somewhere")
    assert hasattr(evaluate.config, "HF_MODULES_CACHE"), f"{EVALUATE}: evaluate.config.HF_MODULES_CACHE is gone"
    monkeypatch.delattr(evaluate.config, "HF_MODULES_CACHE")
    assert of_evaluate.modules_cache() == Path("/somewhere")
    of_evaluate.use_modules_cache("/elsewhere")
    assert not hasattr(evaluate.config, "HF_MODULES_CACHE")


def test_the_scripts_of_a_metric_are_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path))
    scripts = []
    for folder in ("evaluate-metric--exact_match", "owner--exact_match"):
        scripts.append(tmp_path / of_evaluate.MODULES / "metrics" / folder / "hash" / "exact_match.py")
        scripts[-1].parent.mkdir(parents=True)
        scripts[-1].touch()
    assert of_evaluate.cached_scripts("exact_match") == scripts[:1]
    assert of_evaluate.cached_scripts("owner/exact_match") == scripts[1:]
    assert of_evaluate.cached_scripts("another") == []
