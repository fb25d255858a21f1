"""What transformers computes with an exported classifier for one text at a time, without padding."""

import csv

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def logits_of(folder, *texts):
    """The logits [rows, labels] of a list of texts, or of two lists of which each pair is a row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config._attn_implementation == "sdpa"
    found = []
    for row in zip(*texts, strict=True):
        given = tokenizer(*row, truncation=True, max_length=48, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**given).logits[0])
    return torch.stack(found)


def loss_of(folder, file):
    """The mean loss of the texts in a CSV file."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    numbers = AutoConfig.from_pretrained(folder).label2id
    targets = torch.tensor([numbers[row["label"]] for row in rows])
    return F.cross_entropy(logits_of(folder, [row["text"] for row in rows]), targets).item()
