"""The sizes of the default data of the text recipes, and the scores of simple methods without a neural network.

python benchmarks/demo_baselines.py
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from shared.contrastive.retrieval import NAMES, figures
from shared.demo_data import pairs, tagged_functions, texts
from shared.tagging.scores import tagging_scores
from shared.tagging.tags import Tags, first_words


def print_texts() -> None:
    """The accuracy of the majority class, and of TF-IDF of words and pairs of words with logistic regression."""
    (train, labels), (validation, expected) = (
        (table["text"].to_pylist(), np.array(table["label"].to_pylist())) for table in texts.load()
    )
    names, counts = np.unique(labels, return_counts=True)
    print(f"{len(train):,} training texts and {len(validation):,} validation texts: {dict(Counter(labels.tolist()))}")
    print(f"{texts.documents().num_rows:,} documents")
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=1000).fit(tfidf.fit_transform(train), labels)
    accuracy = model.score(tfidf.transform(validation), expected)
    print(f"accuracy: majority class {(expected == names[counts.argmax()]).mean():.3f}, TF-IDF {accuracy:.3f}")


def print_tags() -> None:
    """The scores of the most frequent tag of each word in training, and O for unknown words."""
    train, validation = tagged_functions.load()
    usual: dict[str, Counter[str]] = {}
    for name, part in (("training", train), ("validation", validation)):
        words = [word for words in part["tokens"].to_pylist() for word in words]
        tags = [tag for tags in part["tags"].to_pylist() for tag in tags]
        counts = Counter(tags).most_common()
        print(f"{part.num_rows:,} {name} functions, {len(words):,} words, {len(set(words)):,} different ones")
        print("  " + ", ".join(f"{tag} {count / len(words):.1%}" for tag, count in counts))
        for word, tag in zip(words, tags, strict=True):
            if name == "training":
                usual.setdefault(word, Counter())[tag] += 1
    best = {word: max(sorted(found), key=found.__getitem__) for word, found in usual.items()}
    guesses = [[best.get(word, "O") for word in words] for words in validation["tokens"].to_pylist()]
    guessed = pa.table({"tokens": validation["tokens"], "tags": pa.array(guesses, validation["tags"].type)})
    tags_of_training = Tags.of(train)
    found = tagging_scores(
        tags_of_training, tags_of_training.encode(guessed), tags_of_training.encode(validation), first_words(validation)
    )
    print("most frequent tag: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


def print_pairs() -> None:
    """The retrieval scores of TF-IDF."""
    train, validation = ({name: t[name].to_pylist() for name in ("anchor", "positive", "file")} for t in pairs.load())
    for label, table in (("training", train), ("validation", validation)):
        sizes = Counter(file.partition("/")[0] for file in table["file"])
        print(f"{len(table['file']):,} {label} pairs: {dict(sizes)}")
    # In lower case, and a name such as snake_case is several words: the usual pattern would take it as one.
    tfidf = TfidfVectorizer(sublinear_tf=True, token_pattern=r"[a-z]+|\d+")
    tfidf.fit(train["anchor"] + train["positive"])
    anchors, positives = (tfidf.transform(validation[name]) for name in ("anchor", "positive"))
    similarity = torch.from_numpy((anchors @ positives.T).toarray())
    rows = np.arange(len(similarity))[:, None].repeat(2, axis=1)
    scores = figures(similarity, rows, temperature=0.05).mean(0).tolist()
    print("TF-IDF: " + ", ".join(f"{name} {value:.3f}" for name, value in zip(NAMES, scores[1:], strict=True)))


if __name__ == "__main__":
    print_texts()
    print_tags()
    print_pairs()
