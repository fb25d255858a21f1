"""Checkpoints leave out the frozen parameters of a pretrained model, and a resume compares their digest."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.checkpoints.states import digest_of, frozen_parameters
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.options.text_options import TextOptions
from shared.plan.batches import Plan

PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)


def half_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


@pytest.fixture
def checkpoint(request, accelerator, tmp_path):
    """A checkpoint of a model whose first layer is frozen."""
    config = TextOptions(model_name_or_path="base", output_dir=str(tmp_path))
    model = half_frozen()
    accelerator.prepare(model, make_optimizer(model, config))
    saver = Saver(accelerator, config, PLAN)
    saver.in_background = getattr(request, "param", True)
    saver.save(Progress(step=2), {})
    saver.finish()
    yield resuming.path_of(tmp_path, 2)
    saver.close()


def change(checkpoint, **tensors):
    """Add tensors to the model in a checkpoint, or remove those that are None."""
    file = checkpoint / "model.safetensors"
    changed = load_file(file) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file, {"format": "pt"})


@pytest.mark.parametrize(
    "checkpoint", [True, False], indirect=True, ids=["in the background", "while the training waits"]
)
def test_frozen_parameters_are_left_out_and_the_rest_is_loaded(checkpoint):
    stored = load_file(checkpoint / "model.safetensors")
    assert set(stored) == {name for name in half_frozen().state_dict() if not name.startswith("0.")}
    model = half_frozen()
    with torch.no_grad():
        model[2].weight.zero_()
    resuming.load_weights(model, checkpoint, "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_other_frozen_weights_are_refused(checkpoint):
    model = half_frozen()
    with torch.no_grad():
        model[0].bias[1] += 1e-6
    with pytest.raises(UserError, match="belongs to a run with other frozen weights: --model_name_or_path must name"):
        resuming.load_weights(model, checkpoint, "model.safetensors")


def test_a_file_without_a_trained_parameter_or_with_an_unknown_one_is_refused(checkpoint):
    weight = load_file(checkpoint / "model.safetensors")["2.weight"]
    change(checkpoint, **{"2.weight": None})
    with pytest.raises(RuntimeError, match=r"it differs in 2\.weight$"):
        resuming.load_weights(half_frozen(), checkpoint, "model.safetensors")
    change(checkpoint, **{"2.weight": weight, "3.weight": weight.clone()})
    with pytest.raises(RuntimeError, match=r"it differs in 3\.weight$"):
        resuming.load_weights(half_frozen(), checkpoint, "model.safetensors")


def test_the_digest_depends_on_values_shapes_and_dtypes():
    tensor = torch.arange(6.0)
    others = [tensor + 1, tensor.view(2, 3), tensor.view(torch.int32), tensor[:5]]
    assert len({digest_of([each]) for each in (tensor, *others)}) == 5
    assert digest_of([tensor]) == digest_of([torch.arange(12.0).view(6, 2)[:, 0] / 2])
    assert digest_of([tensor, tensor]) != digest_of([tensor])


def test_a_frozen_parameter_has_all_of_its_names():
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = model["one"].weight
    model["one"].weight.requires_grad_(False)
    assert set(frozen_parameters(model)) == {"one.weight", "two.weight"}
