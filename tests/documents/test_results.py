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


def test_a_row_shows_mean_and_deviation_over_its_seeds_or_that_it_did_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "RUNS", tmp_path)
    assert quality.line("digits", "new").split("|")[2] == " not run "
    machine = {"cpu": "Z80", "cores": 2, "versions": {"torch": "2.13.0+cpu"}}
    for seed, accuracy in enumerate((0.5, 0.7, 0.9)):
        folder = quality.new_folder(tmp_path / f"digits/new/{seed}")
        found = {"command": "python x.py", "commit": "1234567", "machine": machine, "processor_seconds": 10.0 * seed}
        (folder / "run.json").write_text(json.dumps(found))
        lines = [{"step": 1, "eval_loss": 2.0, "eval_accuracy": 0.1}, {"eval_loss": 1.0, "eval_accuracy": accuracy}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"step": 2, "train_runtime": 3}])))
    assert quality.line("digits", "new").endswith(
        "| 0.700 ± 0.200 | - | 3 | 10 | Z80, 2 cores, torch 2.13.0 | 1234567 |"
    )
