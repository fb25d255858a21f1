"""The memory layout of loaded weights, the order of labels, and activation checkpointing.

Models that cannot be loaded are tested in tests/recipes/test_bad_input.py.
"""

import warnings

import families
import pytest
import runs
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from shared.pretrained import from_pretrained
from shared.pretrained.tokenizers import load_tokenizer

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}


def test_the_logits_do_not_depend_on_the_memory_addresses_of_the_weights():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TINY | {"hidden_size": 256})).eval()
    logits = model(torch.arange(6)[None]).logits
    for weights in model.parameters():
        place = torch.empty(weights.numel() + 1)[1:]  # 4 bytes after a multiple of 64
        weights.data = place.view(weights.shape).copy_(weights.data)
    tied = torch.nn.Linear(256, 20, bias=False)
    tied.weight = model.bert.embeddings.word_embeddings.weight
    from_pretrained.align(model)
    assert all(weights.data_ptr() % from_pretrained.ALIGNMENT == 0 for weights in model.parameters())
    assert tied.weight is model.bert.embeddings.word_embeddings.weight
    assert torch.equal(model(torch.arange(6)[None]).logits, logits)


def test_activations_are_recomputed_without_a_warning_and_the_gradients_are_the_same():
    model = BertForSequenceClassification(BertConfig(**TINY)).train()
    ran, found = [], []
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: ran.append(1))
    for calls in (1, 3):  # forward, and once more in the backward pass
        torch.manual_seed(0)  # for dropout
        model(torch.arange(6)[None]).logits.square().sum().backward()
        found.append(model.bert.embeddings.word_embeddings.weight.grad)
        assert len(ran) == calls
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            from_pretrained.checkpoint_activations(model)
    assert torch.equal(*found)


# The labels that a pretrained classifier knows


def head_of(*names):
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def save(folder, kind=BertForSequenceClassification, **head):
    torch.manual_seed(0)
    model = kind(BertConfig(**TINY, **head))
    model.save_pretrained(folder)
    return str(folder), model.state_dict()


def load(name, *names, **more):
    torch.manual_seed(1)
    return from_pretrained.load_classifier("AutoModelForSequenceClassification", name, **head_of(*names), **more)


def test_a_classifier_of_the_same_labels_keeps_its_order_and_its_last_layer(tmp_path, capsys):
    name, weights = save(tmp_path, **head_of("c", "a", "b"))
    assert from_pretrained.label_order(name, ("a", "b", "c")) == ("c", "a", "b")
    assert from_pretrained.label_order(name, ("a", "b")) == ("a", "b")
    model = load(name, "c", "a", "b")
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert model.knows_labels
    assert "labels" not in capsys.readouterr().err


@pytest.mark.parametrize("names", [("x", "y", "z"), ("a", "b")])
def test_for_other_labels_only_the_last_layer_is_new_with_a_message(tmp_path, capsys, names):
    name, weights = save(tmp_path, **head_of("c", "a", "b"))
    model = load(name, *names)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert "classifier.weight" in changed <= {"classifier.weight", "classifier.bias"}
    assert 0.002 < model.classifier.weight.std() < 0.2
    assert torch.equal(load(name, *names).classifier.weight, model.classifier.weight), "as in every process"
    assert not model.knows_labels
    assert list(model.config.id2label.values()) == list(names)
    assert (
        f"--model_name_or_path {name} has a head for 3 labels (c, a, b), but the data have {len(names)} "
        f"({', '.join(names)}): classifier.weight and classifier.bias are new\n"
    ) in capsys.readouterr().err


def test_a_classifier_without_names_keeps_its_numbers_with_a_message(tmp_path, capsys):
    name, weights = save(tmp_path, num_labels=3)
    assert from_pretrained.label_order(name, ("a", "b", "c")) == ("a", "b", "c")
    assert torch.equal(load(name, "a", "b", "c").classifier.weight, weights["classifier.weight"])
    assert "and no names: they are read as a, b, c, in this order" in capsys.readouterr().err


def test_an_encoder_without_a_classifier_gets_one_without_a_message_about_labels(tmp_path, capsys):
    name, _ = save(tmp_path, BertForMaskedLM)
    model = load(name, "a", "b")  # as many labels as the placeholders that transformers has for a model without labels
    assert not model.knows_labels
    assert "labels" not in capsys.readouterr().err


def test_weights_that_transformers_would_draw_anew_are_refused(tmp_path):
    name, weights = save(tmp_path)
    BertConfig(**TINY, max_position_embeddings=600).save_pretrained(tmp_path)
    differs = "position_embeddings.weight is (512, 8) in its files, and (600, 8) by its config.json: correct that"
    assert differs in runs.refusal(load, name, "a", "b")
    BertConfig(**TINY | {"num_hidden_layers": 9}).save_pretrained(tmp_path)
    assert "lack bert.encoder.layer." in (refused := runs.refusal(load, name, "a", "b"))
    assert ", and have nothing else: rename" in refused
    save_file({f"module.{key}": value for key, value in weights.items()}, tmp_path / "model.safetensors")
    assert " more, and have module.bert.embeddings.LayerNorm" in runs.refusal(load, name, "a", "b")


@pytest.mark.parametrize(
    ("family", "last"),
    [
        ("RoBERTa", ["classifier.out_proj.weight", "classifier.out_proj.bias"]),
        ("ModernBERT", ["classifier.weight", "classifier.bias"]),
        ("GPT-2", ["score.weight"]),
    ],
)
@pytest.mark.parametrize("labels", [1, 8])
def test_the_last_layer_is_found(family, last, labels):
    model = families.tiny(families.CLASSIFIER, family, 20, num_labels=labels, pad_token_id=0)
    assert from_pretrained.label_weights(model) == last


# A second model


def test_a_wrong_path_is_reported_under_the_flag_that_gives_it():
    message = runs.refusal(load_tokenizer, "/nowhere", flag="--teacher_name_or_path")
    assert message.startswith("--teacher_name_or_path /nowhere has no config.json")
