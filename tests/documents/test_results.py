"""docs/results.md says what the committed runs say, and the runs name no machine."""

import json
import re
from pathlib import Path

import pytest
import runs
import yaml

from benchmarks import quality
from shared.config import options

FILES = sorted(path for path in quality.RUNS.rglob("*") if path.is_file())
FOLDERS = sorted({path.parent for path in FILES})


def test_the_page_has_the_tables_made_from_the_runs():
    assert quality.PAGE.read_text() == quality.page(), "run python benchmarks/quality.py"


def test_every_run_belongs_to_a_row_and_is_complete():
    assert len(FOLDERS) > 15
    for folder in FOLDERS:
        task, row, seed = folder.relative_to(quality.RUNS).parts
        about = quality.TASKS[task]["rows"][row]
        names = {path.name for path in folder.iterdir()}
        of_recipe = "baseline" not in about and "score" not in about
        assert names == {"run.json", *(("config.yaml", "metrics.jsonl") if of_recipe else ())}, folder
        found = json.loads((folder / "run.json").read_text())
        assert re.fullmatch(r"[0-9a-f]{7}", found["commit"]), "the code that ran is not committed"
        if of_recipe:
            assert found["command"] == quality.command_of(task, row, int(seed))
            assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == int(seed)


@pytest.mark.parametrize(
    ("task", "row"), [(task, row) for task in quality.TASKS for row in quality.TASKS[task]["rows"]]
)
def test_the_command_of_a_row_is_valid(task, row):
    _, script, *words = quality.command_of(task, row, 0).split()
    assert (runs.ROOT / script).is_file()
    if script.startswith("recipes/"):
        options.parse(runs.load_recipe(Path(script).stem).Config, words)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(runs.ROOT).as_posix())
def test_no_file_of_a_run_has_a_path_of_the_machine(path):
    assert not re.findall(r"(?:^|[\s\"'=:])(/\w.*|~/.*|[A-Z]:\\.*)", path.read_text(), re.MULTILINE)
    assert path.stat().st_size < 20_000
