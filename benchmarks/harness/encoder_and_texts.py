"""The encoder and the texts that the benchmarks of recipes/nlp.py train on, written into a folder."""

from pathlib import Path
from typing import Any

MAX_LENGTH = 512
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
LAST_EVALUATION = 32  # texts; the recipe always ends with an evaluation, which is not measured


def prepare(
    folder: Path,
    seed: int,
    texts: int | None,
    evaluation_texts: int = 600,
    sizes: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Write a BERT with random weights, its tokenizer and the texts.

    Args:
        folder: where to.
        seed: of the weights.
        texts: the first so many of the training texts; None: all of them.
        evaluation_texts: how many texts the benchmark of the evaluation gets.
        sizes: fields of BertConfig; default: `SIZES`.

    Returns:
        `encoder`, its folder; `parameters`, their number; `files`, paths of the Parquet files "train_file", "nlp" (few
        texts to validate on) and "eval"; `lengths`, tokens of each training text, int array [texts].
    """
    import pyarrow.parquet as pq
    import torch
    import transformers

    from shared.demo_data import texts as demo_texts
    from shared.text.tokenized import tokenize, train_tokenizer

    tables = demo_texts.load()
    train, validation = tables[0].slice(0, texts), tables[1]
    files = {"train_file": folder / "train.parquet"}
    pq.write_table(train, files["train_file"])
    for name, rows in (("nlp", LAST_EVALUATION), ("eval", evaluation_texts)):
        files[name] = folder / f"validation_{name}.parquet"
        pq.write_table(validation.slice(0, rows), files[name])
    tokenizer = train_tokenizer(train, ("text",), "wordpiece", 8192, MAX_LENGTH)
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=8192,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(set(train["label"].to_pylist())),
        **(sizes or SIZES),
    )
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    lengths = tokenize(train, ("text",), tokenizer, MAX_LENGTH).lengths
    return {
        "encoder": str(folder / "encoder"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "files": {name: str(path) for name, path in files.items()},
        "lengths": lengths,
    }
