"""The files for sweeps start runs of a recipe in folders of their own."""

import os

import pytest
import runs
import yaml

from shared.compare import main as compare
from shared.config.command_line import field_types

EXAMPLES = runs.ROOT / "docs/examples"
SMALL = [*runs.TINY, "--max_train_steps", "2", "--eval_steps", "2"]


@pytest.fixture
def clone(tmp_path):
    """A folder with links to what a sweep uses, and a fake srun, which starts the command here."""
    for name in ("recipes", "shared", "accelerate_configs", "clusters", "docs"):
        (tmp_path / name).symlink_to(runs.ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    return tmp_path


def path(clone):
    return f"{clone / 'bin'}:{runs.BIN}:{os.environ['PATH']}"


@pytest.mark.docs
def test_tasks_of_a_slurm_array_train_with_their_own_rate_and_seed(clone, texts, capsys):
    for task in ("0", "4"):
        words = ["bash", clone / "clusters/slurm/sweep.sbatch", "recipes/nlp.py", *SMALL, *texts]
        runs.succeed(words, folder=clone, PATH=path(clone), SLURM_ARRAY_TASK_ID=task, PROCESSES="1")
    found = {
        run.name: yaml.safe_load((run / "config.yaml").read_text()) for run in sorted((clone / "out/sweep").iterdir())
    }
    assert [(name, run["learning_rate"], run["seed"]) for name, run in found.items()] == [
        ("1e-3-0", 1e-3, 0),
        ("5e-4-1", 5e-4, 1),
    ]
    assert compare([*(str(clone / "out/sweep" / name) for name in found), "--table"]) == 0
    assert "learning_rate" in capsys.readouterr().out


@pytest.mark.docs
def test_a_search_with_optuna_continues_where_it_stopped(clone, texts):
    pytest.importorskip("optuna")
    words = ["python", "docs/examples/sweep_optuna.py", "--trials", "1", "recipes/nlp.py", *SMALL, *texts]
    for number in (1, 2):
        printed = runs.succeed(words, folder=clone, PATH=path(clone))
        assert f"best of {number} trials" in printed
    rates = [
        yaml.safe_load((clone / f"out/search/trial_00{number}/config.yaml").read_text())["learning_rate"]
        for number in (0, 1)
    ]
    assert rates[0] != rates[1]
    assert all((clone / f"out/search/trial_00{number}/model").is_dir() for number in (0, 1))


def test_the_wandb_sweep_names_flags_and_files_that_exist():
    sweep = yaml.safe_load((EXAMPLES / "sweep_wandb.yaml").read_text())
    fields = field_types(runs.load_recipe("nlp").Config)
    line = next(word for word in sweep["command"] if "launch" in word)
    assert {*sweep["parameters"], "report_to", "output_dir"} <= fields.keys()
    assert sweep["command"][-1] == "${args}"
    for word in line.split():
        if word.endswith((".py", ".yaml")):
            assert (runs.ROOT / word).is_file()
    assert (runs.ROOT / sweep["program"]).is_file()
