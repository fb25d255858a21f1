"""The image recipe is the same run on 1, 2 and 3 processes, batch norm and dropout included, and across a restart."""

import shutil

import call_recipe
import pytest
import runs
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from shared.config import options
from shared.images.images import collate
from shared.optimization.optimizers import make_schedule
from shared.plan.batches import Plan
from shared.plan.seeding import seed_dropout

WORLDS = (1, 2, 3)
STEPS = 20
# Crops, mirroring and mixing are on, because their draws, too, must not depend on the number of processes.
RUN = [
    *(*runs.TINY_IMAGES, "--max_train_steps", STEPS, "--eval_steps", STEPS, "--logging_steps", 1),
    *("--horizontal_flip", "--mixup", 0.2, "--cutmix", 1, "--max_grad_norm", 0),
]
GROWS = [
    *(*runs.TINY_IMAGES, "--lr_scheduler_type", "constant", "--warmup_steps", 2, "--logging_steps", 1),
    *("--ema_decay", 0.9, "--optim", "adamw", "--learning_rate", 0.002),
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """{processes: {name: output folder}}, from one launch for each number of processes."""
    folder = tmp_path_factory.mktemp("launches")
    recipe, modes = "recipes/image_classification.py", {"dropout": "dropout"}
    half, whole = [*GROWS, "--max_train_steps", 6], [*GROWS, "--max_train_steps", 12]
    jobs = {
        2: {"dropout": RUN, "moved": half},
        1: {"dropout": RUN, "stayed": whole},
        3: {"dropout": RUN, "moved": whole},
    }
    outputs = {}
    for world, configs in jobs.items():
        if world == 3:
            shutil.copytree(folder / "moved-2", folder / "moved-3")
        outputs[world] = runs.run_many(world, configs, folder, recipe=recipe, modes=modes)
    return outputs


def tensors(output, statistics):
    """The running statistics of a model's batch norms, or everything else, as one vector."""
    saved = load_file(output / "model/model.safetensors")
    chosen = [name for name in sorted(saved) if ("running_" in name) == statistics and "num_batches" not in name]
    return torch.cat([saved[name].flatten().double() for name in chosen])


@pytest.fixture(scope="module")
def reference():
    """The run, written out anew for one process: {parameters and running statistics by name}."""
    recipe = runs.load_recipe("image_classification")
    config = options.parse(recipe.Config, [*map(str, RUN)])
    train, _, _, augmentation = recipe.load_data(config)
    model = call_recipe.with_dropout(recipe.build_model)(config, train.source.names).train()
    plan = Plan(num_samples=len(train), seed=0, global_batch_size=48, max_steps=STEPS, max_samples=12, num_epochs=None)
    decays = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(decays, (5e-4, 0.0), strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    schedule = make_schedule(config, STEPS)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    seen = {norm: [] for norm in norms}
    for norm in norms:
        norm.track_running_stats = False  # only the hook looks
        norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(torch.var_mean(args[0], (0, 2, 3))))
    running = {norm: [norm.running_mean.clone(), norm.running_var.clone()] for norm in norms}
    for step in range(STEPS):
        assert len(plan.cut(step)) == 4
        for piece in plan.cut(step):
            images, targets = augmentation.training(piece, collate([train[i] for i in piece.samples]), 10)
            seed_dropout(torch.device("cpu"), 0, step, piece.index)
            logits = model(pixel_values=images).logits
            (F.cross_entropy(logits, targets, reduction="sum") / 48).backward()
        for norm, found in seen.items():
            for i, place in ((0, 1), (1, 0)):  # var_mean gives the variance first
                mean = torch.stack([statistic[place] for statistic in found]).mean(0).detach()  # equal micro-batches
                running[norm][i] = 0.9 * running[norm][i] + 0.1 * mean
            found.clear()
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
    names = {norm: name for name, norm in model.named_modules()}
    statistics = {
        f"{names[norm]}.running_{what}": pair[i]
        for norm, pair in running.items()
        for i, what in enumerate(("mean", "var"))
    }
    return dict(model.named_parameters()), statistics


@pytest.mark.parametrize("world", WORLDS)
def test_weights_and_running_statistics_equal_those_of_a_loop_in_one_process(outputs, reference, world):
    for expected, statistics in zip(reference, (False, True), strict=True):
        vector = torch.cat([expected[name].detach().flatten().double() for name in sorted(expected)])
        found = tensors(outputs[world]["dropout"], statistics)
        assert len(found) == len(vector)
        assert runs.distance(found, vector) < 1e-5


def test_micro_batches_of_one_step_are_counted_as_one_step(outputs):
    for world in WORLDS:
        saved = load_file(outputs[world]["dropout"] / "model/model.safetensors")
        assert {int(value) for name, value in saved.items() if "num_batches" in name} == {STEPS}


def test_metrics_tell_the_same_story_on_any_number_of_processes(outputs):
    one = runs.metrics(outputs[1]["dropout"])
    for world in (2, 3):
        other = runs.metrics(outputs[world]["dropout"])
        for key in ("samples", "learning_rate"):
            assert [line[key] for line in other if key in line] == [line[key] for line in one if key in line]
        for key in ("loss", "eval_loss", "eval_accuracy", "eval_top_5_accuracy", "eval_macro_f1"):
            expected = [line[key] for line in one if key in line]
            assert expected
            assert [line[key] for line in other if key in line] == pytest.approx(expected, rel=1e-4), key


def test_a_run_that_moves_from_two_processes_to_three_ends_as_one_that_stayed(outputs):
    """Halfway, with a moving average of weights and statistics, which is what is exported."""
    for statistics in (False, True):
        stayed, moved = tensors(outputs[1]["stayed"], statistics), tensors(outputs[3]["moved"], statistics)
        assert runs.distance(moved, stayed) < 1e-5
        assert runs.distance(tensors(outputs[2]["moved"], statistics), stayed) > 1e-3
    assert [line["step"] for line in runs.training_lines(outputs[3]["moved"])] == list(range(1, 13))
