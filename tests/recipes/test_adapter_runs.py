"""Runs with adapters (--lora_rank): resumed, on two processes, exported, and read by PEFT."""

import json

import pytest
import runs
import torch
import toy_data
from exact_runs import prepared
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
)

ADAPTERS = ["--lora_rank", "4", "--lora_dropout", "0.1", "--ema_decay", "0.5"]
OTHERS = {
    "mlm": AutoModelForMaskedLM,
    "token_classification": AutoModelForTokenClassification,
    "embeddings": AutoModel,
}
EVERY = ["--checkpointing_steps", "4", "--learning_rate", "0.01"]


def train(recipe, flags, output):
    """Train, and return the output folder."""
    runs.train(recipe, output, *flags)
    return output


@pytest.fixture(scope="module")
def flags(texts, tmp_path_factory):
    """Flags of a run of nlp.py that trains a tiny pretrained BERT with dropout."""
    base = runs.write_bert_with_dropout(tmp_path_factory.mktemp("base"), texts)
    return [*runs.TINY, *texts, *EVERY, "--model_name_or_path", base]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The output folder of such a run with adapters, uninterrupted."""
    return train("nlp", [*flags, *ADAPTERS], tmp_path_factory.mktemp("lora") / "whole")


def middle(output):
    return output / "checkpoints/step_00000004"


def same_files(one, other, *names):
    return [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def logits(model, folder):
    """The first output of a model: its logits, or the last hidden state."""
    words = AutoTokenizer.from_pretrained(folder)(["Return the name of the test.", "Parse it"], padding=True)
    with torch.no_grad():
        return model.eval()(**words.convert_to_tensors("pt"))[0]


def test_a_checkpoint_has_what_is_trained_and_the_run_resumes_bit_identically(flags, whole, tmp_path):
    resumed = train("nlp", [*flags, *ADAPTERS, "--resume_from_checkpoint", middle(whole)], tmp_path / "resumed")
    files = ("model/model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    assert same_files(whole, resumed, *files)
    stored = load_file(middle(whole) / "model.safetensors")
    assert {name for name in stored if ".lora_" not in name} == {
        f"{module}.{kind}" for module in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")
    }
    assert len(stored) == 2 * 12 + 4


def test_the_average_of_the_adapters_and_the_head_is_exported(whole):
    exported = load_file(whole / "adapter/adapter_model.safetensors")
    average = load_file(whole / "checkpoints/step_00000008/registered_0.safetensors")
    last = load_file(whole / "checkpoints/step_00000008/model.safetensors")
    for name in ("layer.0.attention.self.query.lora_A", "layer.1.output.dense.lora_B", "classifier"):
        (found,) = (value for key, value in exported.items() if key.endswith(f"{name}.weight"))
        (expected,) = (
            value for key, value in average.items() if f"{name}.".replace(".", ":") in key and "bias" not in key
        )
        (weights,) = (value for key, value in last.items() if f"{name}." in key and "bias" not in key)
        assert torch.equal(found, expected), name
        assert not torch.equal(found, weights), name


def test_two_processes_train_the_same_adapters(flags, whole, tmp_path):
    two = runs.run_many(2, {"lora": [*flags, *ADAPTERS]}, tmp_path)["lora"]
    one, other = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (whole, two))
    assert one.keys() == other.keys()
    for name in one:
        assert runs.distance(other[name], one[name]) < 1e-4, name
    assert [line["samples"] for line in runs.training_lines(two)] == [
        line["samples"] for line in runs.training_lines(whole)
    ]


def test_peft_loads_the_adapter_with_its_head_and_gives_the_logits_of_the_merged_model(flags, whole):
    base = AutoModelForSequenceClassification.from_pretrained(flags[-1])
    before = logits(base, whole / "model")
    merged = logits(AutoModelForSequenceClassification.from_pretrained(whole / "model"), whole / "model")
    adapted = PeftModel.from_pretrained(base, whole / "adapter")
    assert runs.distance(merged, before) > 1e-2
    assert runs.distance(logits(adapted, whole / "model"), merged) < 1e-5
    written = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["classifier", "bert.pooler"])
    assert written["base_model_name_or_path"] == str(flags[-1])
    head = load_file(whole / "adapter/adapter_model.safetensors")["base_model.model.classifier.weight"]
    assert not torch.equal(head, load_file(flags[-1] / "model.safetensors")["classifier.weight"])
    assert torch.equal(head, load_file(whole / "model/model.safetensors")["classifier.weight"])


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("mlm", ["--lora_targets", "query", "value"]),
        ("token_classification", ["--no_packing"]),
        ("embeddings", []),
    ],
)
def test_other_recipes_train_the_adapters_and_the_head_of_classes_only(texts, tmp_path, recipe, more):
    auto, classes = OTHERS[recipe], {}
    data = toy_data.tiny(recipe, texts, tmp_path)
    *_, tags, tokenizer = prepared(runs.load_recipe(recipe), data)
    if recipe == "token_classification":
        names = dict(enumerate(tags.names))
        classes = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), **runs.SIZES, **classes, initializer_range=0.5)
    for each in (auto.from_config(config), tokenizer):
        each.save_pretrained(tmp_path / "base")
    words = [*data, *EVERY, *ADAPTERS, *more, "--model_name_or_path", tmp_path / "base", "--max_train_steps", 4]
    output = train(recipe, words, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", output / "model"))
    moved = {name for name in before if name in after and not torch.equal(before[name], after[name])}
    head = {name for name in load_file(output / "adapter/adapter_model.safetensors") if ".lora_" not in name}
    if recipe == "mlm":
        layers = [f"bert.encoder.layer.{layer}.attention.self" for layer in (0, 1)]
        assert moved == {f"{layer}.{kind}.weight" for layer in layers for kind in ("query", "value")}
    if recipe == "token_classification":
        assert {name.rpartition("model.")[2] for name in head} == {"classifier.weight", "classifier.bias"}
    else:
        assert not head
    assert moved
    adapted = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), output / "adapter")
    merged = auto.from_pretrained(output / "model")
    assert runs.distance(logits(adapted, output / "model"), logits(merged, output / "model")) < 1e-5
