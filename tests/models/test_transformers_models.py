"""An exported model of transformers loads with the trained weights, and its card has what the Hub reads."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import runs
from accelerate import Accelerator
from families import MASKED_LM, small

from shared.checkpoints.progress import Progress
from shared.config import options
from shared.errors import UserError
from shared.extras import hub
from shared.models.transformers_models import TransformersExport, sizes_without_effect
from shared.options.data_options import ModelOptions
from shared.run.training_run import Ddp


def export(accelerator, config, progress, model, processor=None):
    run = SimpleNamespace(accelerator=accelerator, config=config, progress=progress, strategy=Ddp(), hooks=())
    TransformersExport().write(run, model, processor)


@pytest.fixture
def finished_progress():
    return Progress(step=8, results={"eval_accuracy": 0.5}, best_step=4, best_results={"eval_accuracy": 0.75})


@pytest.fixture
def model():
    return small("bert", MASKED_LM)  # some of its weights are tied


@pytest.mark.parametrize("wrong", ["_orig_mod.{}", "{}.old"])
def test_an_export_that_would_not_load_with_all_trained_weights_is_refused_and_removed(
    tmp_path, finished_progress, model, wrong
):
    config = ModelOptions(output_dir=str(tmp_path))
    export(Accelerator(cpu=True), config, finished_progress, model)
    shutil.rmtree(tmp_path / "model")

    (tmp_path / "checkpoints").mkdir()
    launched = Accelerator(cpu=True)
    last = "bert.embeddings.LayerNorm.bias"
    renamed = {wrong.format(name) if name == last else name: value for name, value in model.state_dict().items()}
    launched.get_state_dict = lambda _: renamed
    said = rf"1 missing \({re.escape(last)}\), 1 unexpected .*checkpoints are kept"
    with pytest.raises(UserError, match=said):
        export(launched, config, finished_progress, model)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_the_model_card_has_the_results_of_the_model_and_the_command(monkeypatch, tmp_path, finished_progress, model):
    monkeypatch.setattr(sys, "argv", ["recipes/nlp.py", "--train_file", "my data.csv", "--seed", "3"])
    nlp = runs.load_recipe("nlp")
    config = nlp.Config(output_dir=str(tmp_path / "name"), train_file="my data.csv", seed=3)

    def card_of(config):
        return hub.card(SimpleNamespace(config=config, progress=finished_progress, notes=["a note"]), model, tmp_path)

    card = card_of(config)
    assert card.startswith("---\nlibrary_name: transformers\ntags: [accelerate-recipes]\n---\n\n# name\n")
    assert "on my data.csv: 8 steps of 32 samples, seed 3.\n\na note\n\n| metric" in card
    assert "\n| accuracy | 0.5000 |\n" in card
    assert "    recipes/nlp.py --train_file 'my data.csv' --seed 3\n" in card  # can be pasted into a shell

    chosen = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    card = card_of(nlp.Config(model_name_or_path="owner/model", run_name="mine", **chosen))
    for expected in ("\nbase_model: owner/model\n", "\n# mine\n", "on the embedded data: 4 steps", "accuracy | 0.7500"):
        assert expected in card
    new = runs.load_recipe("image_classification").Config(model_name_or_path="owner/model", from_scratch=True)
    assert all("base_model" not in card_of(config) for config in (nlp.Config(model_name_or_path=str(tmp_path)), new))
    (tmp_path / "modules.json").touch()
    assert "\nlibrary_name: sentence-transformers\n" in card_of(nlp.Config())
    assert "on the embedded data: 8" in card_of(runs.load_recipe("embeddings").Config(corpus_file=("searched.csv",)))


BERT = ["--model_name_or_path", "bert"]


@pytest.mark.parametrize(
    ("recipe", "flags", "named"),
    [
        ("nlp", [], ""),
        ("nlp", BERT, ""),
        ("nlp", [*BERT, "--hidden_size", "64", "--vocab_size", "9"], "--hidden_size 64, --vocab_size 9"),
        ("mlm", [*BERT, "--model_type", "bert"], "--model_type bert"),
        ("image_classification", ["--model_name_or_path", "vit", "--depths", "2", "3"], "--depths 2 3"),
    ],
)
def test_sizes_without_effect_on_a_pretrained_model_are_named(recipe, flags, named):
    config_class = runs.load_recipe(recipe).Config
    assert sizes_without_effect(options.parse(config_class, flags)) == named
