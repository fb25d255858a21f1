"""`python -m shared.compare` names the first step at which two runs differ, and the differing value."""

import json
import math
import re

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shared.compare import LOSS, OPTIMIZER, WEIGHTS, Quantity, allowed, difference_of, main, relative, tensors_of
from shared.config.options import NOT_IN_RESULT


@pytest.fixture
def make_run(tmp_path, weights):
    """Write a run folder; `change` gets the list of its lines, `moved` is a relative change of its weights."""

    def make(name, change=list, moved=0.0, checkpoints=(20, 40), finished=True, accuracies=(0.7,), **settings):
        run, model = tmp_path / name, weights | {"layer.weight": weights["layer.weight"] * (1 + moved)}
        run.mkdir()
        numbers = [{"step": step, "loss": 2.0 / step, "learning_rate": 1e-3 / step} for step in range(10, 50, 10)]
        lines = [line | {"samples": f"{line['step']:016x}"} for line in numbers]
        change(lines)
        last = lines[-1]["step"]
        lines += [{"step": last, "eval_loss": 1 - accuracy, "eval_accuracy": accuracy} for accuracy in accuracies]
        if finished:
            lines.append({"step": last, "train_runtime": len(name) * 1.0, "train_samples_per_second": 9.0})
            (run / "model").mkdir()
            save_file(model, run / "model" / "model.safetensors")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = yaml.safe_dump({"seed": 1, "output_dir": name} | settings)
        (run / "config.yaml").write_text(f"{NOT_IN_RESULT}output_dir\n{settings}")
        for step in checkpoints:
            save_checkpoint(run, step, model)
        return run

    return make


def save_checkpoint(run, step, model, **others):
    """Write a checkpoint; `others` are the contents of further files, by the name of the file without .safetensors."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in {"model": model, **others}.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "manifest.json").write_text("{}")


def compare(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def changed(index, **values):
    return {"change": lambda lines: lines[index].update(values)}


def cut(*where, **more):
    return {"change": lambda lines: lines.__delitem__(slice(*where))} | more


SAME = {  # what differs: run A, run B, and what the table says
    "speed": ({}, changed(0, samples_per_second=3.0), "A | B: none"),  # nor does the folder affect it
    "loss by rounding": ({}, changed(1, loss=0.1 * (1 + 5e-5)), r"loss +4 steps, 10 to 40 +5.0e-05 at step 20"),
    "nothing, NaN": (changed(1, loss="NaN"), changed(1, loss="NaN"), r"loss +4 steps, 10 to 40 +equal"),
    # Run B logs every 20 steps: its loss at step 20 is the mean of twice as many steps as A's.
    "logged steps": ({}, cut(0, None, 2), r"samples +2 steps, 20 to 40 +equal(.|\n)*loss +not compared"),
    "interrupted": ({"checkpoints": (10, 40)}, {"checkpoints": (30, 40)}, r"checkpoints: model +step 40 +equal"),
    "no checkpoints": ({}, {"checkpoints": (), "checkpointing_steps": "no"}, r"checkpoints +not compared"),
    "weights by rounding": ({}, {"moved": 1e-6}, r"\nmodel +step 40 +\d.\de-07"),
}
DIED = cut(2, None, checkpoints=(20,), finished=False)
LONGER = {"change": lambda lines: lines.append(lines[-1] | {"step": 60})}
DIFFERENT = {  # what differs: run B, and the end of the report
    "loss": (changed(2, loss=0.07), "step 30 in loss: 0.06666666666666667 against 0.07"),
    "learning rate": (changed(1, learning_rate=math.nextafter(5e-5, 1)), "step 20 in learning rate: "),
    "samples": (changed(3, samples="00"), "step 40 in samples: 0000000000000028 against 00"),
    "NaN": (changed(1, loss="NaN"), "step 20 in loss: 0.1 against nan"),
    # The cause is named before its consequences.
    "all": (changed(1, loss=9.0, samples="00", learning_rate=1.0), "step 20 in samples"),
    "weights": ({"moved": 1e-3}, r"step 20 in checkpoints: model: off by .* \(1.0e-03 in layer.weight\)"),
    "no checkpoint": ({"checkpoints": (20,)}, "step 40 in checkpoints: model: only A has batches"),
    "died": (DIED, "step 21 in end: A ends at step 40, finished; B at step 20, not finished"),
    "no model": ({"finished": False}, "step 40 in end: A ends at step 40, finished; B at step 40, not"),
    "longer": (LONGER, "step 41 in end: A ends at step 40, finished; B at step 60, finished"),
}


@pytest.mark.parametrize(("first", "second", "said"), SAME.values(), ids=SAME)
def test_runs_that_are_the_same(make_run, capsys, first, second, said):
    code, out, _ = compare(capsys, make_run("a", **first), make_run("b", **second))
    assert (code, out[-1].partition(": ")[0]) == (0, "the same run")
    assert re.search(said, "\n".join(out))


@pytest.mark.parametrize(("second", "verdict"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_step_and_value_that_differ_are_named(make_run, capsys, second, verdict):
    code, out, _ = compare(capsys, make_run("a"), make_run("b", **second))
    assert code == 1
    assert re.match(f"the runs first differ at {verdict}", out[-1])


def test_optimizer_and_averaged_weights_are_compared(make_run, weights, capsys):
    """A moment that is rarely large still counts: each kind of moment is a vector of its own."""
    moments = {"layer/exp_avg": torch.ones(3), "layer/exp_avg_sq": torch.full((3,), 1e-6)}

    def saved(name, by_moment, by_average):
        run, average = make_run(name), weights | {"layer.weight": weights["layer.weight"] * (1 + by_average)}
        optimizer = moments | {"layer/exp_avg_sq": moments["layer/exp_avg_sq"] * (1 + by_moment)}
        save_checkpoint(run, 40, weights, optimizer=optimizer, registered_0=average)
        return run

    a = saved("a", 0, 0)
    for *changes, said in (
        ("b", 0, 0, "the same run: "),
        ("c", 1e-2, 0, "the runs first differ at step 40 in checkpoints: optimizer: off by 9.9e-03 .*exp_avg_sq"),
        ("d", 0, 1e-2, "the runs first differ at step 40 in checkpoints: registered_0: off"),
    ):
        code, out, _ = compare(capsys, a, saved(*changes))
        assert code == (changes[0] != "b")
        assert re.match(said, out[-1])


def test_a_sharded_checkpoint_is_not_compared(make_run, capsys):
    for checkpoint in (sharded := make_run("b")).glob("checkpoints/*"):
        (checkpoint / "model.safetensors").unlink()
        (checkpoint / "pytorch_model_fsdp_0").mkdir()
    code, out, _ = compare(capsys, make_run("a"), sharded)
    assert (code, out[-1]) == (0, "the same run: samples, learning rate, loss, end, model")


def test_a_jump_is_a_difference_at_a_step_where_rounding_may_have_grown_as_far():
    """Measured: weights off by 5e-5 at step 94; losses off by 1.3e-2 and moments by 2.6e-2 after 1,440 steps."""
    assert 5e-5 < allowed(94, WEIGHTS, math.inf) < 1e-3
    assert 1.3e-2 < allowed(1440, LOSS, 6e-3) < 0.1
    assert allowed(1440, OPTIMIZER, 2e-2) > 2.6e-2
    for off, differs_at in (((1e-4, 1e-3, 3e-3), None), ((1e-7, 1e-6, 3e-3), 1020)):
        at = {step: (by, "") for step, by in zip((1000, 1010, 1020), off, strict=True)}
        assert Quantity("loss", at, LOSS).differs_at() == differs_at


def test_the_numbers_of_processes_and_the_settings_that_differ_are_shown(make_run, capsys):
    a = make_run(
        "a", lambda lines: [line.update(processes=1 + (line["step"] != 20)) for line in lines], learning_rate=0.1
    )
    _, out, _ = compare(capsys, a, make_run("b", seed=2))
    assert [line.partition(": ")[2] for line in out[:2]] == ["processes 2, then 1, then 2", "processes unknown"]
    assert out[2] == "settings that differ, A | B: learning_rate 0.1 | absent, seed 1 | 2"


def test_runs_that_cannot_be_compared_exit_with_2_and_one_line(make_run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    a = make_run("a")
    (make_run("binary") / "config.yaml").write_bytes(b"\xff")
    make_run("elsewhere", lambda lines: [line.update(step=line["step"] + 3) for line in lines], checkpoints=())
    for other, flags, said in (
        ("missing", (), "missing/metrics.jsonl"),
        ("empty", (), ""),
        ("elsewhere", (), "--logging_steps"),
        (make_run("b", seed=1), ["--table"], "have the same settings and the same seed"),
        (make_run("c", seed=2, finished=False), ["--table"], "is not finished"),
        ("binary", ["--table"], "binary/config.yaml: cannot be read as YAML"),
        ("none", ["--table"], f"No such file or directory: '{tmp_path / 'none/config.yaml'}'"),
    ):
        code, out, error = compare(capsys, a, tmp_path / other, *flags)
        assert (code, out, error.count("\n")) == (2, [], 1)
        assert said in error


def test_the_difference_is_infinite_for_other_tensors_and_for_values_that_are_not_finite(tmp_path, weights):
    def difference(**changed):
        (tmp_path / "b").mkdir(exist_ok=True)
        save_file(weights | changed, tmp_path / "b" / "model.safetensors")
        return difference_of(*(tensors_of(tmp_path / name)["model"] for name in "ab"))

    (tmp_path / "a").mkdir()
    for number, (name, tensor) in enumerate(weights.items()):  # a model in several files is the same model
        save_file({name: tensor}, tmp_path / "a" / f"model-{number}.safetensors")
    assert difference()[0] == 0
    assert difference(head=torch.ones(1)) == (math.inf, "only B has head")
    assert difference(batches=torch.tensor(8)) == (math.inf, "batches differs")
    for other in (torch.ones(9), weights["layer.bias"].half(), torch.full_like(weights["layer.bias"], math.nan)):
        assert difference(**{"layer.bias": other})[0] == math.inf


@given(st.floats(), st.floats())
def test_the_relative_difference_is_symmetric_and_zero_only_for_equal_numbers(a, b):
    assert relative(a, b) == relative(b, a)
    assert not math.isnan(relative(a, b))
    assert (relative(a, b) == 0) == (a == b or (math.isnan(a) and math.isnan(b)))


# The table of results


def table(capsys, *runs):
    """The exit code, and the cells of the table of results."""
    code, out, _ = compare(capsys, *runs, *["--table"] * (len(runs) == 2))  # three runs need no flag
    return code, [re.split(r"  +", line) for line in out]


def test_runs_that_differ_only_in_their_seed_share_a_row(make_run, capsys):
    rate = {"learning_rate": 0.1}
    runs = [make_run(f"a{seed}", accuracies=(0.5, (8 + seed) / 10), seed=seed, **rate) for seed in range(3)]
    runs.append(make_run("other", seed=0, learning_rate=0.01))
    runs += [make_run(f"nan{seed}", accuracies=(math.nan,), seed=seed, learning_rate=9) for seed in range(2)]
    code, rows = table(capsys, *runs)
    assert code == 0
    assert rows[0] == ["learning_rate", "runs", "seeds", "eval_loss", "eval_accuracy"]
    assert rows[1] == ["0.1", "3", "0 1 2", "0.1 ± 0.1", "0.9 ± 0.1"]
    assert rows[2] == ["0.01", "1", "0", "0.3", "0.7"]
    assert rows[3] == ["9", "2", "0 1", "nan ± nan", "nan ± nan"]


def test_the_result_is_that_of_the_best_model_if_the_run_exports_it(make_run, capsys):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "greater_is_better": None}
    runs = [make_run(f"a{seed}", accuracies=(math.nan, 0.9, 0.8), seed=seed, **best) for seed in range(2)]
    assert table(capsys, *runs)[1][1] == ["2", "0 1", "0.1 ± 0", "0.9 ± 0"]
