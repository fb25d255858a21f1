"""Recipes of one's own are exact; what would silently be another run is refused, as is another shared/."""

import os
import re
import shutil
import sys

import pytest
import runs

from shared.errors import UserError

RECIPE = (runs.ROOT / "docs/examples/diabetes.py").read_text()
# Without a bias before the batch norm: its gradient would be rounding noise, which Adam scales up.
BATCH_NORM = (
    "nn.Linear(10, config.hidden_size), ",
    "nn.Linear(10, config.hidden_size, bias=False), nn.BatchNorm1d(config.hidden_size), ",
)
AVERAGED = (  # with the hook that averages the statistics
    BATCH_NORM,
    ("from shared.monitoring import", "from shared.models.batch_norm import BatchNorm\nfrom shared.monitoring import"),
    ("loader, compute_loss)", "loader, compute_loss, BatchNorm())"),
)
SEED, START = "        torch.manual_seed(config.seed)\n", "        run.start("
SUM = ".sum() / micro_batch.normalizer"
DUE, SET = "            run.evaluate_if_due()\n", "            set_learning_rate(optimizer, schedule(step))\n"
GROUP, RATE = "optimizer.add_param_group({'params': ", "optimizer.param_groups[0]['lr']"


def groups(given):
    """The change by which a recipe has an optimizer of these groups of the parameters of a model `m`."""
    return SEED, f"        make_optimizer = lambda m, _: torch.optim.AdamW({given}, lr=0.01)\n"


def write(folder, *changes):
    """Write the recipe of docs/your_own_recipe.md with `changes` (old, new) to a file, and return its path."""
    source = RECIPE
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = folder / "recipe.py"
    path.write_text(source)
    return path


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A function that trains such a recipe in this process; `flags` end with further flags."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or Python runs the old recipe if the new one has its size
    short = "--max_train_steps", 6, "--eval_steps", 3, "--logging_steps", 2
    return lambda changes, *flags: runs.train(runs.load(write(tmp_path, *changes)), tmp_path / "run", *short, *flags)


RANDOM = (  # noise in the initial weights, when samples are collated, in the loss, and in each update
    ("import torch\n", "import numpy as np\nimport torch\n"),
    (SEED, ""),
    ("train, plan, default_collate", "train, plan, noisy"),
    (".sum() / micro_batch", ".sum() * np.random.uniform(0.9, 1.1) / micro_batch"),
    (START, f"        optimizer.optimizer.register_step_post_hook(add_noise)\n{START}"),
    (
        "def main(",
        "def add_noise(optimizer, *_):\n    for p in optimizer.param_groups[0]['params']:\n"
        "        p.data.add_(1e-3 * torch.randn_like(p))\n\n\ndef noisy(rows):\n"
        "    return [x + 0.01 * np.random.rand() for x in default_collate(rows)]\n\n\ndef main(",
    ),
)


@pytest.mark.parametrize("changes", [AVERAGED, RANDOM], ids=["batch norm", "random numbers"])
def test_a_model_of_ones_own_gives_the_same_run_on_one_process_and_on_two(changes, tmp_path):
    flags = ["--max_train_steps", 40, "--micro_batches_per_step", 4, "--lr_scheduler_type", "constant"]
    configs, recipe = [{"run": [*flags, "--dataloader_num_workers", n]} for n in (0, 1)], write(tmp_path, *changes)
    one, two = (runs.run_many(n, config, tmp_path, recipe)["run"] for n, config in enumerate(configs, 1))
    assert runs.distance(runs.weights(two), runs.weights(one)) < 1e-5
    scores = [[line["eval_r2"] for line in runs.metrics(folder) if "eval_r2" in line] for folder in (one, two)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert scores[0][-1] > 0.3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((SUM, ".mean()"), r"^compute_loss .*micro_batch\.normalizer.*docs/your_own_recipe\.md"),
        ((SUM, SUM.replace("()", "(0, keepdim=True)")), "^compute_loss returned no tensor that is one number and"),
        ((SUM, SUM.replace("()", "().item()")), "^compute_loss returned no tensor that is one number and has a gr"),
        ((SUM, f".detach(){SUM}"), "^compute_loss returned no tensor that is one number and has a gradient: return"),
        ((SUM, f"{SUM} * torch.seed()"), "in a second pass over the first one: draw only from the generators"),
        (("make_optimizer, l", "lambda m, _: __import__('pytorch_optimizer').SPlus(m.parameters()), l"), "with eval"),
        (("InMemory(20 * rows[:88], targets[:88])", "InMemory(rows[:0])"), "^load_data returned a InMemory without s"),
        (groups("[*m.parameters(), nn.Parameter(torch.ones(1))]"), r"does not have \(shape \[1\]\)"),
        (groups("[{'params': [p], 'lr': p.ndim} for p in m.parameters()]"), r"groups \(2, 1\) would be lost"),
        (groups("[{'params': p, 'lr' if p.ndim > 1 else 'lr_scale': len(p)} for p in m.parameters()]"), r"\(64, 1\)"),
        ((START, f"        {GROUP}nn.Parameter(torch.ones(1))}})\n{START}"), "or the optimizer has a new group"),
        ((DUE, f"            {GROUP}[]}})\n{DUE}"), "or the optimizer has a new group: a resumed run"),
        ((START, f"        torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)\n{START}"), "a scheduler object"),
        ((DUE, f"            {RATE} /= 2  # as ReduceLROnPlateau does\n{DUE}"), "a scheduler object"),
        ((SET, f"            schedule = lambda _: {RATE}\n"), r"rate of 0\.01, and set_learning_rate did not"),
        ((SET, f"{SET}            optimizer.param_groups[0]['lr_scale'] = step\n"), "rate did not set it: call it"),
        ((SET, ""), r"rate of 0\.0083\d+, and set_learning_rate did not"),
        (("num_samples=len(train)", "num_samples=len(validation)"), "the data set has 354 samples, and its plan 88"),
    ],
)
def test_what_would_silently_be_another_run_is_refused(train, tmp_path, change, expected):
    assert re.search(expected, runs.refusal(train, [change]))
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_folder_of_another_run_is_not_continued_from_a_checkpoint_elsewhere(train, tmp_path):
    train([])
    (tmp_path / "run").rename(tmp_path / "first")
    train([], "--seed", 1)
    message = runs.refusal(train, [], "--resume_from_checkpoint", tmp_path / "first/checkpoints/step_00000006")
    assert f"{tmp_path}/run belongs to a run with other settings (--seed was 1, is 0" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('"eval_r2"', '"eval_R2"'), "^evaluate returned eval_loss, eval_R2, but not eval_r2; .* after step 3"),
        (('"eval_r2"', "2"), "^evaluate returned 2, but the names of scores begin with eval_; .* after step 3"),
        (('return {"eval_loss"', 'return {"eval_loss"} or {"eval_loss"'), "^evaluate must return numbers by their nam"),
        (("losses_of, (len", "lambda m, _, b: 2 * [m(b[0])], (len"), r"tions \[88, 1\] and losses \[88, 1\], not"),
        (("(len(validation),)", "(len(validation), 2)"), r"predictions \[88\] and losses \[88\], not \[88, 2\] and"),
        (("            batches", "            1 / 0\n            batches"), "^division by zero"),
    ],
)
def test_no_work_is_lost_when_the_first_evaluation_fails(train, tmp_path, change, expected):
    for _ in range(2):  # the second start evaluates again before it trains
        with pytest.raises((UserError, ZeroDivisionError), match=f"{expected}[^\n]*$"):
            train([change])
        assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000003"]
    train([])
    evaluated = [line["step"] for line in runs.metrics(tmp_path / "run") if "eval_r2" in line]
    assert evaluated == [3, 6]


@pytest.mark.parametrize("recipe", ["x.py", "recipes/x.py"])
def test_a_recipe_refuses_an_installed_shared_if_its_own_lies_beside_its_folder(tmp_path, recipe):
    """PYTHONPATH stands for an editable installation: both come after the folder of the recipe."""
    shutil.copytree(runs.ROOT / "shared", tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / recipe
    script.parent.mkdir(exist_ok=True)
    shutil.copy(runs.ROOT / "docs/examples/diabetes.py", script)
    command = [sys.executable, script, "--dry_run", "--output_dir", tmp_path / "out"]
    installed = f"{runs.ROOT}{os.pathsep}{runs.packages_path()}"
    found = runs.run(command, tmp_path, PYTHONPATH=installed)
    if recipe == "recipes/x.py":
        assert found.returncode == 2, found.stderr
        assert f"would use {runs.ROOT / 'shared'}, which is installed in this environment" in found.stderr
        assert f"start it with PYTHONPATH={tmp_path}" in found.stderr
        assert "Traceback" not in found.stderr
        found = runs.run(command, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{installed}")
    assert found.returncode == 0, found.stderr
