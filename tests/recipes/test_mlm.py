"""The recipe for masked language models: masks of validation texts, export, configs, optimizer.

test_exactness.py tests that runs on any number of processes are equal.
"""

import itertools
import json
from types import SimpleNamespace
from unittest import mock

import exact_runs
import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file

from shared.config import options
from shared.encoders.text_models import new_encoder
from shared.errors import UserError
from shared.models.optimizers import make_optimizer

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def trained(mlm, texts, tmp_path_factory):
    """The folder of a finished run of twenty steps."""
    output = tmp_path_factory.mktemp("trained") / "run"
    runs.train(mlm, output, *exact_runs.mlm_runs(texts)["adam"])
    return output


def test_the_masks_of_validation_text_do_not_depend_on_the_masking_flags_or_the_seed(mlm, texts):
    usual, *other = (
        runs.prepared(mlm, [*texts, *runs.TINY, *flags])[2]
        for flags in ([], ["--mlm_probability", "0.5"], ["--seed", "5"], ["--mask_replace_prob", "0.2"])
    )
    everything, epochs = np.arange(len(usual)), np.zeros(len(usual), int)
    for data in other:
        both = zip(usual.read_micro_batch(everything, epochs), data.read_micro_batch(everything, epochs), strict=True)
        assert all(np.array_equal(a, b) for a, b in both)
    _, tokens, _, labels, masked = usual.read_micro_batch(everything, epochs)
    assert set(tokens[masked]) == {usual.masking.mask_token}
    special = 2 * len(usual)  # [CLS] and [SEP] of each piece
    assert len(masked) / (usual.num_tokens - special) == pytest.approx(0.15, abs=0.02)
    assert usual.masking.mask_token not in labels


def test_the_exported_model_fills_masks_and_both_recipes_start_from_it(mlm, trained, texts, tmp_path):
    from transformers import pipeline

    folder = trained / "model"
    fill = pipeline("fill-mask", model=str(folder))
    assert 0 < fill(f"Return the {fill.tokenizer.mask_token} of the element.")[0]["score"] < 1
    assert json.loads((folder / "config.json").read_text())["vocab_size"] % 64 == 0

    nlp = runs.load_recipe("nlp")
    again = [*texts, *runs.TINY, "--model_name_or_path", folder]
    config, *_, labels, tokenizer = runs.prepared(nlp, again)
    own, pretrained = nlp.build_model(config, labels, tokenizer).state_dict(), load_file(folder / "model.safetensors")
    loaded = [name for name in pretrained if name in own and torch.equal(own[name], pretrained[name])]
    assert set(own) - set(loaded) == {"classifier.weight", "classifier.bias"}, "only the classifier is new"
    runs.train(mlm, tmp_path / "second", *again, "--max_train_steps", 1, "--warmup_steps", 0)
    (first,) = runs.training_lines(tmp_path / "second")
    assert first["loss"] < runs.training_lines(trained)[0]["loss"] - 0.3


@pytest.mark.parametrize("name", ["modernbert_base", "bert_base"])
def test_the_full_size_configs_load_and_train_with_tiny_dimensions(mlm, texts, tmp_path, name):
    file = str(runs.ROOT / f"recipes/configs/{name}.yaml")
    full = options.parse(mlm.Config, ["--config", file])
    assert full.hidden_size == 768
    assert full.vocab_size % 64 == 0
    decay_per_step = full.weight_decay * full.learning_rate  # torch's AdamW multiplies the two
    assert decay_per_step == pytest.approx(1e-5), "as in the sources, whose weight decay leaves out the learning rate"
    tiny = [*texts, *runs.TINY, "--intermediate_size", 48, "--max_train_steps", 2, "--mixed_precision", "no"]
    runs.train(mlm, tmp_path / "run", "--config", file, *tiny)
    assert [line["step"] for line in runs.training_lines(tmp_path / "run")] == [2]


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_a_new_model_has_the_requested_positions_and_rotary_base(mlm, kind):
    tokenizer = mock.MagicMock(pad_token_id=3, cls_token_id=1, sep_token_id=2, __len__=lambda _: 100)

    def sizes_of(rope_theta):
        config = SimpleNamespace(model_type=kind, hidden_size=64, num_attention_heads=2, num_hidden_layers=3)
        vars(config).update(intermediate_size=None, max_length=512, rope_theta=rope_theta)
        return new_encoder("AutoModelForMaskedLM", config, tokenizer, vocab_multiple=64).config

    sizes = sizes_of(None)
    assert sizes.vocab_size == 128
    assert sizes.max_position_embeddings == (516 if kind == "roberta" else 512)
    if kind != "modernbert":
        with pytest.raises(UserError, match=r"--rope_theta 10000\.0 has no effect without --model_type modernbert"):
            options.parse(mlm.Config, ["--model_type", kind, "--rope_theta", "1e4"])
        return
    for chosen, theta in ((sizes, 160_000), (sizes_of(1e4), 10_000)):
        found = {name: part["rope_theta"] for name, part in chosen.rope_parameters.items()}
        assert found == {"full_attention": theta, "sliding_attention": 10_000}


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest(mlm, texts, kind):
    flags = [*texts, *runs.TINY, "--model_type", kind, "--optim", "muon", "--weight_decay", 0.1, "--adam_beta2", 0.98]
    config, _, _, tokenizer = runs.prepared(mlm, flags)
    model = mlm.build_model(config, tokenizer)
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], group) for group in make_optimizer(model, config).param_groups for p in group["params"]]
    assert len(found) == len(names)
    for name, group in found:
        matrix = model.get_parameter(name).ndim >= 2
        assert group["use_muon"] == (matrix and ".layer" in name), name
        assert group["use_muon"] or (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-10)
        assert (group["weight_decay"] > 0) == matrix, name


@pytest.mark.campaign
def test_with_few_labels_a_pretrained_model_beats_one_from_scratch(mlm, tmp_path):
    """The means of three seeds after 100 steps of fine-tuning on few texts; docs/pretraining.md lists them."""
    runs.train(mlm, tmp_path / "mlm", "--max_train_steps", 520)
    ways = {"from scratch": [], "pretrained": ["--model_name_or_path", tmp_path / "mlm/model"]}
    for texts in (200, 1000):
        flags = ["--learning_rate", 1e-3, "--max_train_steps", 100, "--eval_steps", 100, "--max_train_samples", texts]
        scores = {way: [] for way in ways}
        for way, seed in itertools.product(ways, range(3)):
            output = tmp_path / f"{way}-{texts}-{seed}"
            found = runs.train("nlp", output, *flags, *ways[way], "--seed", seed)
            scores[way].append(found["eval_accuracy"])
        assert np.mean(scores["pretrained"]) > np.mean(scores["from scratch"]), (texts, scores)
