"""Search for settings of a recipe with Optuna. Each trial is a run in a folder of its own.

    python docs/examples/sweep_optuna.py --trials 20 recipes/nlp.py --train_file train.csv

Start it again to continue the search: out/search/journal.log has the trials so far. Several machines that share the
folder can search at the same time.
"""

import argparse
import json
import subprocess
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

SCORE = "eval_accuracy"
LAUNCHER = ["accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml"]  # EDIT: the launcher of one run


def settings_of(trial: optuna.Trial) -> dict[str, float | str]:
    """The settings of a trial: EDIT them."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
        "warmup_ratio": trial.suggest_float("warmup_ratio", 0.0, 0.2),
        "lr_scheduler_type": trial.suggest_categorical("lr_scheduler_type", ["linear", "cosine"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials of this start")
    parser.add_argument("--output_dir", type=Path, default=Path("out/search"))
    arguments, recipe = parser.parse_known_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    def train(trial: optuna.Trial) -> float:
        output = arguments.output_dir / f"trial_{trial.number:03d}"
        flags = [f"--{name}={value}" for name, value in settings_of(trial).items()]
        subprocess.run([*LAUNCHER, *recipe, *flags, "--output_dir", str(output)], check=True)
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [line[SCORE] for line in lines if SCORE in line][-1]

    storage = JournalStorage(JournalFileBackend(str(arguments.output_dir / "journal.log")))
    study = optuna.create_study(study_name="search", storage=storage, direction="maximize", load_if_exists=True)
    study.optimize(train, n_trials=arguments.trials)
    print(f"best of {len(study.trials)} trials: trial {study.best_trial.number}, {SCORE} {study.best_value:.4g}")
    print(" ".join(f"--{name} {value}" for name, value in study.best_params.items()))


if __name__ == "__main__":
    main()
