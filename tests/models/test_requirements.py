"""`build_model` may return any `nn.Module`, as the README says: it is checked before training, exported and loaded."""

from typing import NamedTuple

import pytest
import runs
import torch
from safetensors.torch import load_model
from torch import nn

from shared.encoders.masked_head import predict_only_masked
from shared.models.optimizers import muon_groups

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


class Output(NamedTuple):
    logits: torch.Tensor


class Words(nn.Module):
    """Classify texts by their mean word vector or, without `labels`, predict each word, with tied weights."""

    def __init__(self, words, labels=None):
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.head = nn.Linear(8, labels or words)
        self.mean = labels is not None
        if labels is None:
            self.head.weight = self.words.weight

    def forward(self, input_ids, attention_mask):
        vectors = self.words(input_ids)
        if self.mean:
            real = attention_mask[..., None]
            vectors = (vectors * real).sum(1) / real.sum(1)
        return Output(self.head(vectors))


class Pixels(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.head = nn.Linear(3, labels)

    def forward(self, pixel_values):
        return Output(self.head(pixel_values.mean((2, 3))))


def masked(config, tokenizer):
    model = Words(len(tokenizer))
    predict_only_masked(model, config.packing)
    return model


MAKE = {
    "nlp": lambda config, labels, tokenizer: Words(len(tokenizer), labels.num_labels),
    "mlm": masked,
    "image_classification": lambda config, names: Pixels(len(names)),
}


@pytest.mark.parametrize("recipe", list(MAKE))
def test_a_custom_model_trains_is_exported_and_loaded_and_its_finished_run_is_recognized(
    texts, monkeypatch, tmp_path, capsys, recipe
):
    module, made = runs.load_recipe(recipe), []

    def make(*args):
        made.append((MAKE[recipe](*args), args))
        return made[-1][0]

    monkeypatch.setattr(module, "build_model", make)
    flags = runs.TINY_IMAGES if recipe == "image_classification" else [*runs.TINY, *texts]
    flags = [*flags, "--max_train_steps", 2, "--eval_steps", 2]
    results = runs.train(module, tmp_path / "run", *flags)
    (model, args), folder = made[0], tmp_path / "run/model"
    again = MAKE[recipe](*args)
    before = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    assert load_model(again, folder / "model.safetensors") == (set(), [])
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    card = (folder / "README.md").read_text()
    assert f"holds the state dict of a {type(model).__name__}" in card
    assert 'load_model(model, "model.safetensors")' in card
    assert "library_name: transformers" not in card
    capsys.readouterr()
    assert runs.train(module, tmp_path / "run", *flags) == pytest.approx(results)
    assert "holds this run, finished" in capsys.readouterr().out


def test_muon_needs_to_know_the_head():
    assert runs.refusal(muon_groups, Words(9), 0.1).startswith("--optim muon, which must know the head of a model: ")
