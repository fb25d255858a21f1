"""Small data sets for the recipes that train on other texts than runs.write_texts, and encoders with dropout."""

import csv
import json
from pathlib import Path

import runs
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.demo_data import tagged_functions

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
RECIPES = ("nlp", "token_classification", "embeddings")  # those of the campaigns


def word_tokenizer(words=WORDS):
    """A tokenizer in which each word is a token."""
    vocabulary = {word: i for i, word in enumerate(["?", "[MASK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", mask_token="[MASK]")


def tagged_rows(count=100, shortest=4, longest=39):
    """{tokens, tags} of functions, whose names have roles, cut to lengths in words."""
    rows = tagged_functions.load()[0].slice(0, count).to_pylist()
    lengths = [shortest + 7 * i % (longest + 1 - shortest) for i in range(count)]
    cut = zip(rows, lengths, strict=True)
    return [{name: row[name][:length] for name in ("tokens", "tags")} for row, length in cut]


def write_tagged(folder, rows, validation_rows=30):
    """Write train.jsonl and validation.jsonl, the last rows of `rows`; return their flags."""
    flags = []
    for name, part in (("train", rows[:-validation_rows]), ("validation", rows[-validation_rows:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        flags += [f"--{name}_file", folder / f"{name}.jsonl"]
    return flags


def write_tuples(texts, folder):
    """Write the texts of `texts` as tuples: every other word, the remaining words, two other texts, and a score.

    Returns the flags. Half of the rows have the same anchor as other rows, the other half the same positive.
    """
    flags = []
    for flag, file in zip(texts[::2], texts[1::2], strict=True):
        with Path(file).open(newline="") as opened:
            words = [text.split() for text, _ in list(csv.reader(opened))[1:]]
        rows = [[" ".join(each[::2]), " ".join(each[1::2])] for each in words]
        for i in range(8, len(rows), 2):
            rows[i][0], rows[i - 1][1] = rows[i % 8][0], rows[i % 8][1]
        negatives = [(" ".join(words[i - 1]), " ".join(words[i - 2])) for i in range(len(words))]
        path = folder / Path(file).with_suffix(".tuples.csv").name
        with path.open("w", newline="") as opened:
            named = "anchor", "positive", "negative", "negative_2", "score"
            scores = [i * 7 % 11 / 2 for i in range(len(rows))]
            tuples = zip(rows, negatives, scores, strict=True)
            csv.writer(opened).writerows([named, *((*row, *others, score) for row, others, score in tuples)])
        flags += [flag, path]
    return flags


def write_data(recipe, texts, folder):
    """Write the small data set of a text recipe; return its flags. `texts` are those of runs.write_texts."""
    if recipe == "token_classification":
        return write_tagged(folder, tagged_rows())
    return write_tuples(texts, folder) if recipe == "embeddings" else texts


def tiny(recipe, texts, folder):
    """The flags of a tiny run of any recipe, whose data are written to `folder`."""
    return runs.TINY_IMAGES if recipe == "image_classification" else [*write_data(recipe, texts, folder), *runs.TINY]


def write_numbered(recipe, folder, count):
    """As `write_data`, with `count` training samples whose texts begin with the number of the sample; return the flags.

    So no two rows of the model are equal.
    """
    if recipe == "token_classification":
        rows = tagged_rows(count + 30, 3, 6)  # so short that each text is one window
        for number, row in enumerate(rows):
            row["tokens"][0] = str(number)
        return write_tagged(folder, rows)
    flags = write_data(recipe, runs.write_texts(folder, rows=count), folder)
    with flags[1].open(newline="") as file:
        heading, *rows = csv.reader(file)
    with flags[1].open("w", newline="") as file:  # the last column has labels or scores
        numbered = ([*(f"{i} {text}" for text in texts), last] for i, (*texts, last) in enumerate(rows))
        csv.writer(file).writerows([heading, *numbered])
    return flags


def write_encoder_with_dropout(folder, recipe, data):
    """Write a BERT with random weights and dropout 0.1, without a head, and the tokenizer of a recipe's tiny runs."""
    from transformers import BertConfig, BertModel

    if recipe == "nlp":
        return runs.write_bert_with_dropout(folder, data)  # with a head
    *_, tokenizer = runs.prepared(recipe, [*data, *runs.TINY])
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **runs.SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
