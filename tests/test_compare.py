"""`python -m shared.compare` names the first step at which two runs differ, and the differing value."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shared.compare import main, relative, weight_difference

STEPS = range(10, 50, 10)


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(8, 8, generator=generator),
        "layer.bias": torch.randn(8, generator=generator, dtype=torch.float64).bfloat16(),
        "batches": torch.tensor(7),
    }


@pytest.fixture
def make_run(tmp_path, weights):
    """Write a run folder; `change` gets the list of its lines."""

    def make(name, change=lambda lines: None, model=weights, checkpoints=(20, 40), **settings):
        run = tmp_path / name
        (run / "model").mkdir(parents=True)
        lines = [
            {
                "step": step,
                "loss": 2.0 / step,
                "learning_rate": 1e-3 / step,
                "grad_norm": 0.1,
                "samples": f"{step:016x}",
            }
            for step in STEPS
        ]
        change(lines)
        lines += [
            {"step": 40, "eval_accuracy": 0.9, "eval_loss": 0.3},
            {"step": 40, "train_runtime": len(name) * 1.0, "train_samples_per_second": 9.0},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "config.yaml").write_text(yaml.safe_dump({"seed": 1, "output_dir": name} | settings))
        save_file(model, run / "model" / "model.safetensors")
        for step in checkpoints:
            folder = run / "checkpoints" / f"step_{step:08d}"
            folder.mkdir(parents=True)
            save_file(model, folder / "model.safetensors")
            (folder / "manifest.json").write_text("{}")
        return run

    return make


def compare(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def moved(weights, by):
    return weights | {"layer.weight": weights["layer.weight"] * (1 + by)}


def set_line(index, **values):
    return lambda lines: lines[index].update(values)


def test_equal_runs_are_the_same_run_byte_for_byte(make_run, capsys):
    code, out, _ = compare(capsys, make_run("a"), make_run("b", set_line(0, samples_per_second=3.0)))
    assert code == 0
    assert out[-1] == (
        "the same run: 4 steps, 10 to 40 (samples equal, learning rate equal, loss equal, "
        "checkpoints byte for byte, model byte for byte)"
    )
    assert "settings that differ, A | B: none" in out  # output_dir differs, but does not affect the result


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (set_line(2, loss=0.07), "the runs first differ at step 30 in loss: 0.0666667 against 0.07"),
        (
            set_line(1, learning_rate=math.nextafter(5e-5, 1)),
            "the runs first differ at step 20 in learning rate: 5e-05 against 5.000000000000001e-05",
        ),
        (set_line(3, samples="00"), "the runs first differ at step 40 in samples: 0000000000000028 against 00"),
        (set_line(1, loss="NaN"), "the runs first differ at step 20 in loss: 0.1 against nan"),
    ],
)
def test_the_first_step_that_differs_is_named(make_run, capsys, change, verdict):
    code, out, _ = compare(capsys, make_run("a"), make_run("b", change))
    assert code == 1
    assert out[-1].startswith(verdict)


def test_within_one_step_the_cause_is_named_before_its_consequences(make_run, capsys):
    _, out, _ = compare(capsys, make_run("a"), make_run("b", set_line(1, loss=9.0, samples="00", learning_rate=1.0)))
    assert out[-1].startswith("the runs first differ at step 20 in samples")
    table = "\n".join(out)
    assert re.search(r"^learning rate +4 steps, 10 to 40 +off by 1.0e\+00 at step 20 +step 20$", table, re.MULTILINE)
    assert re.search(r"^loss +4 steps, 10 to 40 +off by 9.9e-01 at step 20 +step 20$", table, re.MULTILINE)


def test_the_loss_has_a_tolerance_and_the_learning_rate_has_none(make_run, capsys):
    a, b = make_run("a"), make_run("b", set_line(1, loss=0.1 * (1 + 5e-5)))
    code, out, _ = compare(capsys, a, b)
    assert code == 0
    assert "loss off by 5.0e-05 at step 20" in out[-1]
    assert compare(capsys, a, b, "--loss_tolerance", "1e-6")[0] == 1


def test_nan_in_both_runs_is_no_difference(make_run, capsys):
    code, _, _ = compare(capsys, make_run("a", set_line(1, loss="NaN")), make_run("b", set_line(1, loss="NaN")))
    assert code == 0


def test_a_loss_is_compared_only_where_it_is_a_mean_over_the_same_steps(make_run, capsys):
    """Run B logs every 20 steps: its loss at step 20 is the mean of twice as many steps as A's."""
    code, out, _ = compare(capsys, make_run("a"), make_run("b", lambda lines: lines.__delitem__(slice(0, None, 2))))
    assert code == 0
    assert re.search(r"^loss +not compared", "\n".join(out), re.MULTILINE)
    assert re.search(r"^samples +2 steps, 20 to 40 +equal", "\n".join(out), re.MULTILINE)


def test_the_tensor_that_differs_most_is_named(make_run, weights, capsys):
    code, out, _ = compare(capsys, make_run("a"), make_run("b", model=moved(weights, 1e-3)))
    assert code == 1
    expected = 1e-3 * math.sqrt(1 / (1 + (weights["layer.bias"].norm() / weights["layer.weight"].norm() / 1.001) ** 2))
    where = "at step 20 in checkpoints"
    assert out[-1] == f"the runs first differ {where}: off by {expected:.1e} (1.0e-03 in layer.weight)"


def test_weights_within_the_tolerance_are_the_same_run_but_not_byte_for_byte(make_run, weights, capsys):
    code, out, _ = compare(capsys, make_run("a"), make_run("b", model=moved(weights, 1e-6)))
    assert code == 0
    assert "byte for byte" not in out[-1]
    assert "model off by" in out[-1]


def test_an_incomplete_checkpoint_is_not_compared(make_run, weights, capsys):
    b = make_run("b", checkpoints=(20,), model=weights)
    broken = b / "checkpoints" / "step_00000040"
    broken.mkdir()
    save_file(moved(weights, 1.0), broken / "model.safetensors")
    code, out, _ = compare(capsys, make_run("a"), b)
    assert code == 0
    assert re.search(r"^checkpoints +step 20 +byte for byte", "\n".join(out), re.MULTILINE)


def test_final_weights_of_runs_of_different_length_are_not_compared(make_run, weights, capsys):
    def longer(lines):
        lines.append(lines[-1] | {"step": 60})

    code, out, _ = compare(capsys, make_run("a"), make_run("b", longer, model=moved(weights, 1.0), checkpoints=()))
    assert code == 0
    assert "not compared: the runs end at steps 40 and 60" in "\n".join(out)


def test_settings_that_differ_are_listed(make_run, capsys):
    _, out, _ = compare(capsys, make_run("a", learning_rate=0.1), make_run("b", seed=2))
    assert "settings that differ, A | B: learning_rate 0.1 | absent, seed 1 | 2" in out


def test_runs_that_cannot_be_compared_exit_with_2_and_one_line(make_run, tmp_path, capsys):
    a = make_run("a")
    code, out, error = compare(capsys, a, tmp_path / "missing")
    assert (code, out) == (2, [])
    assert error == f"error: {tmp_path}/missing: the folder has no metrics.jsonl; give the --output_dir of a run\n"

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert compare(capsys, a, empty)[0] == 2

    elsewhere = make_run(
        "elsewhere", lambda lines: [line.update(step=line["step"] + 3) for line in lines], checkpoints=()
    )
    code, out, error = compare(capsys, a, elsewhere)
    assert (code, out) == (2, [])
    assert "--logging_steps" in error


def test_the_difference_is_infinite_for_other_tensors_and_for_values_that_are_not_finite(tmp_path, weights):
    def difference(model):
        (tmp_path / "b").mkdir(exist_ok=True)
        save_file(model, tmp_path / "b" / "model.safetensors")
        return weight_difference(tmp_path / "a", tmp_path / "b")

    (tmp_path / "a").mkdir()
    save_file(weights, tmp_path / "a" / "model.safetensors")
    assert difference(weights) == (0.0, "byte for byte")
    assert difference(weights | {"head": torch.ones(1)}) == (math.inf, "only one has head")
    assert difference(weights | {"layer.bias": torch.ones(9)})[0] == math.inf
    assert difference(weights | {"layer.weight": torch.full((8, 8), math.nan)})[0] == math.inf
    assert difference(moved(weights, math.inf))[0] == math.inf
    assert difference(weights | {"batches": torch.tensor(8)}) == (math.inf, "batches differs")


def test_a_model_in_several_files_equals_the_same_model_in_one_file(tmp_path, weights):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    save_file(weights, tmp_path / "one" / "model.safetensors")
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, tmp_path / "many" / f"model-{number}.safetensors")
    assert weight_difference(tmp_path / "one", tmp_path / "many") == (0.0, "byte for byte")


@given(st.floats(), st.floats())
def test_the_relative_difference_is_symmetric_and_zero_only_for_equal_numbers(a, b):
    assert relative(a, b) == relative(b, a)
    assert not math.isnan(relative(a, b))
    assert (relative(a, b) == 0) == (a == b or (math.isnan(a) and math.isnan(b)))


def test_the_module_runs_as_a_command_and_its_exit_code_is_1_for_different_runs(make_run, monkeypatch, capsys):
    a, b = make_run("a"), make_run("b", set_line(2, loss=0.07))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(a), str(b)])
    monkeypatch.delitem(sys.modules, "shared.compare")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shared.compare", run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("the runs first differ at step 30 in loss")
