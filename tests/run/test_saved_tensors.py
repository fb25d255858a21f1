"""Two saved models are compared tensor by tensor; what only one of them has is infinitely far away."""

import math

import torch
from safetensors.torch import save_file

from shared.run.saved_tensors import difference_of, parts_of


def moved(weights, by):
    return weights | {"layer.weight": weights["layer.weight"] * (1 + by)}


def test_the_difference_is_infinite_for_other_tensors_and_for_values_that_are_not_finite(tmp_path, weights):
    def difference(model):
        (tmp_path / "b").mkdir(exist_ok=True)
        save_file(model, tmp_path / "b" / "model.safetensors")
        return difference_of(*(parts_of(tmp_path / name)["model"] for name in "ab"))

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
    one, many = (parts_of(tmp_path / name)["model"] for name in ("one", "many"))
    assert difference_of(one, many) == (0.0, "byte for byte")
