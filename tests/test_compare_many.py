"""`python -m shared.compare RUN RUN RUN` prints the mean and the spread of results over seeds."""

import json
import re

import pytest
import yaml

from shared.compare import main


@pytest.fixture
def make_run(tmp_path):
    """Write the folder of a finished run with these evaluations, and return its path."""

    def make(name, *accuracies, finished=True, **settings):
        run = tmp_path / name
        run.mkdir()
        lines = [
            {"step": step, "eval_loss": 1 - accuracy, "eval_accuracy": accuracy}
            for step, accuracy in enumerate(accuracies, 1)
        ]
        lines += [{"step": len(lines), "train_runtime": 1.0}] * finished
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {"learning_rate": 0.1, "output_dir": name, "logging_steps": len(name)} | settings
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        return str(run)

    return make


def printed(capsys, *arguments):
    code = main(arguments)
    out, error = capsys.readouterr()
    return code, [re.split(r"  +", line) for line in out.splitlines()], error


def test_runs_that_differ_only_in_their_seed_share_a_row(make_run, capsys):
    runs = [make_run(f"a{seed}", 0.5, accuracy, seed=seed) for seed, accuracy in enumerate((0.8, 0.9, 1.0))]
    runs.append(make_run("other", 0.7, seed=0, learning_rate=0.01))
    code, table, _ = printed(capsys, *runs)
    assert code == 0
    assert table[0] == ["learning_rate", "runs", "seeds", "eval_loss", "eval_accuracy"]
    assert table[1] == ["0.1", "3", "0 1 2", "0.1 ± 0.1", "0.9 ± 0.1"]
    assert table[2] == ["0.01", "1", "0", "0.3", "0.7"]


def test_the_result_is_that_of_the_best_model_if_the_run_exports_it(make_run, capsys):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "greater_is_better": None}
    runs = [make_run(f"a{seed}", 0.9, 0.8, seed=seed, **best) for seed in range(2)]
    _, table, _ = printed(capsys, *runs, "--table")
    assert table[1] == ["2", "0 1", "0.1 ± 0", "0.9 ± 0"]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"seed": 0}, "have the same settings and the same seed"),
        ({"seed": 1, "finished": False}, "is not finished"),
        (None, "none/config.yaml: no such file; give the --output_dir of a run"),
    ],
)
def test_runs_without_comparable_results_are_one_line_and_exit_code_2(make_run, capsys, second, expected):
    other = make_run("b", 0.5, **second) if second else "none"
    code, table, error = printed(capsys, make_run("a", 0.5, seed=0), other, "--table")
    assert (code, table, error.count("\n")) == (2, [], 1)
    assert expected in error
