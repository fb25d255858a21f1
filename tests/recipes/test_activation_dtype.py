"""--activation_dtype in a whole run: two processes, FSDP, export in float32."""

import pytest
import runs
import torch
from safetensors.torch import load_file

BF16 = ["--activation_dtype", "bf16", "--mixed_precision", "no"]
FLAGS = {"plain": [], "bf16": BF16}
HOW = {"two": {"ACCELERATE_USE_CPU": "true"}, "sharded": runs.FSDP}


@pytest.fixture(scope="module", params=["two", pytest.param("sharded", marks=pytest.mark.clusters)])
def gradients(request, texts, tmp_path_factory):
    """{how: {name: move of the weights by one step}}, on one process, and on two under DDP or under FSDP.

    One step, because rounding to bf16 makes of the last bit of a weight a much larger difference in the next step.
    """
    # FSDP trains with AdamW only, whose first step is the sign of the gradient; DDP shows the gradient itself.
    adam = ["--max_train_steps", 1, "--warmup_steps", 0, "--adam_epsilon", 1.0, "--learning_rate", 1.0]
    adam += ["--weight_decay", 0, "--max_grad_norm", 0, "--lr_scheduler_type", "constant"]
    adam += ["--checkpointing_steps", "no"]
    folder = tmp_path_factory.mktemp("gradients")
    configs = {name: [*texts, *runs.TINY, *adam, "--model_type", "bert", *flags] for name, flags in FLAGS.items()}
    found = {"one": runs.run_many(1, configs, folder, "recipes/mlm.py")}
    several = {"bf16": configs["bf16"]}
    found[request.param] = runs.run_many(2, several, folder, "recipes/mlm.py", **HOW[request.param])
    recipe = runs.load_recipe("mlm")
    config, *_, tokenizer = runs.prepared(recipe, configs["plain"])
    start = recipe.build_model(config, tokenizer).state_dict()  # the weights before the first step
    return {how: {name: moved(output, start) for name, output in each.items()} for how, each in found.items()}


def moved(output, start):
    """By how much the step moved the weights: with an epsilon of 1 AdamW's move is nearly the gradient."""
    tensors = load_file(output / "model/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    return torch.cat([(tensors[name] - start[name]).flatten().double() for name in sorted(tensors)])


def test_the_gradient_of_a_step_is_that_of_one_process_and_near_that_of_float32(gradients):
    (how,) = {*gradients} - {"one"}
    assert runs.distance(gradients[how]["bf16"], gradients["one"]["bf16"]) < 1e-4
    assert 1e-4 < runs.distance(gradients["one"]["bf16"], gradients["one"]["plain"]) < 0.05
