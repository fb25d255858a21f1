"""The encoder and the texts that the benchmarks of recipes/nlp.py train on, and encoders for other benchmarks."""

from pathlib import Path
from typing import Any

MAX_LENGTH = 512
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
LAST_EVALUATION = 32  # texts; the recipe always ends with an evaluation, which is not measured


def write_texts(folder: Path, texts: int | None = None) -> dict[str, Path]:
    """Write the embedded texts as files, and return the recipe's flags for them.

    Args:
        folder: where to.
        texts: the first so many of the training texts; None: all of them.
    """
    import pyarrow.parquet as pq

    from shared.demo_data import texts as demo_texts

    folder.mkdir(exist_ok=True)
    train, validation = demo_texts.load()
    files = {"train_file": folder / "train.parquet", "validation_file": folder / "validation.parquet"}
    pq.write_table(train.slice(0, texts), files["train_file"])
    pq.write_table(validation.slice(0, LAST_EVALUATION), files["validation_file"])
    return files


def prepare(folder: Path, texts: int | None = None, sizes: dict[str, int] | None = None) -> dict[str, Path]:
    """Write a BERT with random weights, its tokenizer and the embedded texts.

    Args:
        folder: where to.
        texts: see `write_texts`.
        sizes: fields of BertConfig; default: `SIZES`.

    Returns:
        The flags of the recipe for them: model_name_or_path, train_file and validation_file.
    """
    import pyarrow.parquet as pq

    from shared.text.tokenized import train_tokenizer

    files = write_texts(folder, texts)
    train = pq.read_table(files["train_file"])
    tokenizer = train_tokenizer(train, ("text",), "wordpiece", 8192, MAX_LENGTH)
    fields = (sizes or SIZES) | {"num_labels": len(set(train["label"].to_pylist()))}
    write_bert(folder / "encoder", tokenizer, "BertForSequenceClassification", 8192, **fields)
    return files | {"model_name_or_path": folder / "encoder"}


def write_bert(folder: Path, tokenizer: Any, kind: str, vocab_size: int, **fields: Any) -> None:
    """Write a BERT with random weights and without dropout, and its tokenizer.

    Args:
        folder: where to.
        tokenizer: of the texts.
        kind: the class of transformers.
        vocab_size: tokens that the model embeds.
        fields: further ones of BertConfig; default: those of BERT-base.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=vocab_size, **without_dropout | fields)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
