"""Predict a file, read predictions, and write inputs and models, for tests."""

import csv
import json
from types import SimpleNamespace

import runs
import torch

from shared import predict
from shared.contrastive.models import SentenceTokenizer


def predict_file(*words):
    """The scores of `python -m shared.predict` with these words."""
    return predict.predict(predict.parse_request([str(word) for word in words]))


def read_csv(path):
    """The rows of a CSV file as {column: text}."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path, header, rows):
    """Write a CSV file and return its path."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read_jsonl(path):
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path, rows):
    """Write a file of JSON lines and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_bert(folder, alone, kind, **config):
    """A tiny BERT with random weights and the tokenizer of the run; returns its folder and the model."""
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(alone / "model")
    if kind == "BertForSequenceClassification":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    sizes = runs.SIZES | {"vocab_size": len(tokenizer), "initializer_range": 0.3, "pad_token_id": 0}
    model = getattr(transformers, kind)(transformers.BertConfig(**sizes, **config)).eval()
    model.save_pretrained(folder)
    if kind == "BertModel":
        settings = SimpleNamespace(pooling="mean", static=False, max_length=(48,), prompts=None)
        tokenizer = SentenceTokenizer(tokenizer, settings, 32)
    tokenizer.save_pretrained(folder)
    return folder, model


def write_resnet(folder, labels, **config):
    """Write a tiny ResNet with random weights for images of 16 x 16 pixels; return its folder."""
    import transformers

    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, num_labels=labels, **config)
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    transformers.BitImageProcessorPil(size=size, do_center_crop=False, crop_size=size).save_pretrained(folder)
    return folder
