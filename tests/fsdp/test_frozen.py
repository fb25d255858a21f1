"""Checkpoints of a pretrained model have its frozen parameters as a digest, which a resumed run compares."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.errors import UserError
from shared.fsdp.strategy import SaverOfWhole, digest_of_tensors, frozen_parameters
from shared.optimization.optimizers import make_optimizer
from shared.options.text_options import TextOptions
from shared.plan.batches import Plan


def half_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def saver_of(model, accelerator, folder):
    accelerator.free_memory()
    config = TextOptions(model_name_or_path="base", output_dir=str(folder))
    accelerator.prepare(model, make_optimizer(model, config))
    return SaverOfWhole(accelerator, config, Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1))


@pytest.fixture
def checkpoint(request, accelerator, tmp_path):
    """A checkpoint of a model whose first layer is frozen, and of a registered module that is frozen."""
    accelerator.register_for_checkpointing(nn.Linear(2, 2).requires_grad_(False))
    saver = saver_of(half_frozen(), accelerator, tmp_path)
    saver.in_background = getattr(request, "param", True)
    saver.save(Progress(step=2), {})
    saver.finish()
    yield resuming.path_of(tmp_path, 2)
    saver.close()


@pytest.mark.parametrize("checkpoint", [True, False], indirect=True, ids=["in the background", "the training waits"])
def test_frozen_parameters_are_left_out_and_the_rest_is_loaded(checkpoint, accelerator, tmp_path):
    stored = load_file(checkpoint / "model.safetensors")
    assert set(stored) == {name for name in half_frozen().state_dict() if not name.startswith("0.")}
    model = half_frozen()
    model[2].weight.data.zero_()
    saver_of(model, accelerator, tmp_path).load(checkpoint)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_other_frozen_weights_are_refused(checkpoint, accelerator, tmp_path):
    model = half_frozen()
    model[0].bias[1] += 1e-6
    with pytest.raises(UserError, match="belongs to a run with other frozen weights: --model_name_or_path must name"):
        saver_of(model, accelerator, tmp_path).load(checkpoint)


def test_a_registered_module_is_loaded_with_its_frozen_parameters(checkpoint, accelerator, tmp_path):
    saver = saver_of(half_frozen(), accelerator, tmp_path)
    weight = saver.others[0].weight
    expected = weight.clone()
    weight.zero_()
    saver.load(checkpoint)
    assert torch.equal(weight, expected)


def test_a_file_without_a_trained_parameter_or_with_an_unknown_one_is_refused(checkpoint, accelerator, tmp_path):
    stored = load_file(checkpoint / "model.safetensors")
    less = {name: tensor for name, tensor in stored.items() if name != "2.weight"}
    for wrong, tensors in (("2.weight", less), ("3.weight", stored | {"3.weight": torch.ones(2)})):
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=rf"\(it differs in {wrong}\)"):
            saver_of(half_frozen(), accelerator, tmp_path).load(checkpoint)


def test_the_digest_depends_on_values_shapes_and_dtypes():
    tensor = torch.arange(6.0)
    others = [tensor + 1, tensor.view(2, 3), tensor.view(torch.int32), tensor[:5]]
    assert len({str(digest_of_tensors([each])) for each in (tensor, *others)}) == 5
    assert digest_of_tensors([tensor]) == digest_of_tensors([torch.arange(12.0).view(6, 2)[:, 0] / 2])
    assert digest_of_tensors([tensor, tensor]) != digest_of_tensors([tensor])


def test_a_frozen_parameter_has_all_of_its_names():
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = model["one"].weight
    model["one"].weight.requires_grad_(False)
    assert set(frozen_parameters(model)) == {"one.weight", "two.weight"}
