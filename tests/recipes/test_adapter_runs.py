"""Runs with adapters (--lora_rank): resumed, on two processes, exported, and read by PEFT."""

import json

import pytest
import runs
import torch
import toy_data
import transformers
from peft import PeftModel
from safetensors.torch import load_file

ADAPTERS = ["--lora_rank", "4", "--lora_dropout", "0.1", "--ema_decay", "0.5"]
EVERY = ["--checkpointing_steps", "4", "--learning_rate", "0.01"]


@pytest.fixture(scope="module")
def flags(texts, tmp_path_factory):
    """Flags of a run of nlp.py that trains adapters of a tiny pretrained BERT with dropout."""
    base = runs.write_bert_with_dropout(tmp_path_factory.mktemp("base"), texts)
    return [*runs.TINY, *texts, *EVERY, *ADAPTERS, "--model_name_or_path", base]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The output folder of such a run, uninterrupted."""
    output = tmp_path_factory.mktemp("lora") / "whole"
    runs.train("nlp", output, *flags)
    return output


def logits(model, folder):
    """The first output of a model: its logits, or the last hidden state."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer(["Return the name of the test.", "Parse it"], padding=True)
    with torch.no_grad():
        return model.eval()(**words.convert_to_tensors("pt"))[0]


def assert_peft_equals_merged(auto, base, output):
    """PEFT with the adapter gives the logits of the merged model."""
    adapted = PeftModel.from_pretrained(auto.from_pretrained(base), output / "adapter")
    merged = logits(auto.from_pretrained(output / "model"), output / "model")
    assert runs.distance(logits(adapted, output / "model"), merged) < 1e-5


def test_a_checkpoint_has_what_is_trained_and_the_run_resumes_bit_identically(flags, whole, tmp_path):
    middle = whole / "checkpoints/step_00000004"
    runs.train("nlp", tmp_path, *flags, "--resume_from_checkpoint", middle)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
    stored = load_file(middle / "model.safetensors")
    assert {name for name in stored if ".lora_" not in name} == {
        f"{module}.{kind}" for module in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")
    }
    assert len(stored) == 2 * 12 + 4


def test_the_average_of_the_adapters_and_the_head_is_exported(whole):
    exported = load_file(whole / "adapter/adapter_model.safetensors")
    average, last = (
        load_file(whole / f"checkpoints/step_00000008/{name}.safetensors") for name in ("registered_0", "model")
    )
    for name in ("layer.0.attention.self.query.lora_A", "layer.1.output.dense.lora_B", "classifier"):
        (found,) = (value for key, value in exported.items() if key.endswith(f"{name}.weight"))
        dotted = {key.replace(":", "."): value for key, value in average.items() if "bias" not in key}
        (expected,) = (value for key, value in dotted.items() if f"{name}." in key)
        (weights,) = (value for key, value in last.items() if f"{name}." in key and "bias" not in key)
        assert torch.equal(found, expected), name
        assert not torch.equal(found, weights), name


def test_two_processes_train_the_same_adapters(flags, whole, tmp_path):
    two = runs.run_many(2, {"lora": flags}, tmp_path)["lora"]
    one, other = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (whole, two))
    assert one.keys() == other.keys()
    for name in one:
        assert runs.distance(other[name], one[name]) < 1e-4, name
    samples = [[line["samples"] for line in runs.training_lines(folder)] for folder in (two, whole)]
    assert samples[0] == samples[1]


def test_peft_loads_the_adapter_with_its_head_and_gives_the_logits_of_the_merged_model(flags, whole):
    assert_peft_equals_merged(transformers.AutoModelForSequenceClassification, flags[-1], whole)
    written = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["classifier", "bert.pooler"])
    assert written["base_model_name_or_path"] == str(flags[-1])


@pytest.mark.parametrize(
    ("recipe", "auto", "more"),
    [
        ("mlm", transformers.AutoModelForMaskedLM, ["--lora_targets", "query", "value"]),
        ("token_classification", transformers.AutoModelForTokenClassification, ["--no_packing"]),
        ("embeddings", transformers.AutoModel, []),
    ],
)
def test_other_recipes_train_adapters(texts, tmp_path, recipe, auto, more):
    data = toy_data.tiny(recipe, texts, tmp_path)
    *_, tags, tokenizer = runs.prepared(recipe, data)
    numbers = {}
    if recipe == "token_classification":
        numbers = {"label2id": {name: number for number, name in enumerate(tags.names)}}
        numbers["id2label"] = dict(enumerate(tags.names))
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokenizer), **runs.SIZES, **numbers, initializer_range=0.5)
    for each in (auto.from_config(config), tokenizer):
        each.save_pretrained(tmp_path / "base")
    words = [*data, *EVERY, *ADAPTERS, *more, "--model_name_or_path", tmp_path / "base", "--max_train_steps", 4]
    runs.train(recipe, tmp_path / "run", *words)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", tmp_path / "run/model"))
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    assert_peft_equals_merged(auto, tmp_path / "base", tmp_path / "run")
