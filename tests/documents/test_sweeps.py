"""The files for sweeps start runs of a recipe in folders of their own."""

import os

import pytest
import runs
import yaml

from shared.config.command_line import kinds_of

EXAMPLES = runs.ROOT / "docs/examples"
SMALL = [*runs.TINY, "--max_train_steps", "2", "--eval_steps", "2"]


@pytest.fixture
def clone(tmp_path):
    """A clone, and a fake srun, which starts the command here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    return runs.write_clone(tmp_path)


def config_of(run):
    return yaml.safe_load((run / "config.yaml").read_text())


def path(clone):
    return f"{clone / 'bin'}:{runs.BIN}:{os.environ['PATH']}"


@pytest.mark.docs
def test_tasks_of_a_slurm_array_train_with_their_own_rate_and_seed(clone, texts):
    for task in ("0", "4"):
        words = ["bash", clone / "clusters/slurm/sweep.sbatch", "recipes/nlp.py", *SMALL, *texts]
        runs.succeed(words, folder=clone, PATH=path(clone), SLURM_ARRAY_TASK_ID=task, PROCESSES="1")
    found = {path.name: config_of(path) for path in (clone / "out/sweep").iterdir()}
    settings = {name: (run["learning_rate"], run["seed"]) for name, run in found.items()}
    assert settings == {"1e-3-0": (1e-3, 0), "5e-4-1": (5e-4, 1)}


@pytest.mark.docs
def test_a_search_with_optuna_continues_where_it_stopped(clone, texts):
    pytest.importorskip("optuna")
    words = ["python", "docs/examples/sweep_optuna.py", "--trials", "1", "recipes/nlp.py", *SMALL, *texts]
    for number in (1, 2):
        printed = runs.succeed(words, folder=clone, PATH=path(clone))
        assert f"best of {number} trials" in printed
    trials = [clone / f"out/search/trial_00{number}" for number in (0, 1)]
    assert len({config_of(trial)["learning_rate"] for trial in trials}) == 2
    assert all((trial / "model").is_dir() for trial in trials)


def test_the_wandb_sweep_names_flags_and_files_that_exist():
    sweep = yaml.safe_load((EXAMPLES / "sweep_wandb.yaml").read_text())
    fields = kinds_of(runs.load_recipe("nlp").Config)
    line = next(word for word in sweep["command"] if "launch" in word)
    assert {*sweep["parameters"], "report_to", "output_dir"} <= fields.keys()
    assert sweep["command"][-1] == "${args}"
    for word in line.split():
        if word.endswith((".py", ".yaml")):
            assert (runs.ROOT / word).is_file()
    assert (runs.ROOT / sweep["program"]).is_file()
