"""Measure a last layer that computes the tokens of the loss only, against one that computes all, on a CPU, in turns.

    python benchmarks/masked_layer.py --rounds 15

A round is the CPU time of a forward and backward pass over 16 packed documents of 98 to 128 tokens, without optimizer,
in one thread, in float32, for the models of CASES. In both, the head computes the tokens of the loss only. Writes
masked_layer.json and masked_layer.md into the output folder.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, rounds
from shared.encoders.masked_head import compute_only_masked, predict_only_masked
from shared.encoders.packing import Packing, use_packed_attention
from shared.launch.starting import keep_freed_memory
from shared.models.layers import is_short

LENGTHS = np.arange(128, 96, -2)  # tokens of the documents, from the longest to the shortest, as the plan sorts them
SIZES: dict[str, Any] = {"vocab_size": 8192, **encoder_and_texts.SIZES}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERNBERT = SIZES | {"intermediate_size": 2 * SIZES["hidden_size"], "pad_token_id": 0}  # the last layer is global
CASES: dict[str, tuple[str, dict[str, Any], float]] = {  # name: class of the model, its config, share of the tokens
    "BERT, 15 % masked": ("BertForMaskedLM", BERT, 0.15),
    "BERT, 30 % masked": ("BertForMaskedLM", BERT, 0.3),
    "ModernBERT, 30 % masked": ("ModernBertForMaskedLM", MODERNBERT, 0.3),
    "BERT, tags of 70 % of the tokens": ("BertForTokenClassification", BERT | {"num_labels": 9}, 0.7),
}


def ways(name: str) -> dict[str, Callable[[], object]]:
    """The functions that make a pass of a case, by name."""
    kind, sizes, share = CASES[name]
    build = getattr(transformers, kind)
    model = build(build.config_class(**sizes)).train()
    predict_only_masked(model)
    compute_only_masked(SimpleNamespace(packing=True), model)
    assert is_short(model)
    use_packed_attention(model, torch.device("cpu"), "no")
    generator, begins = np.random.default_rng(0), np.cumsum(LENGTHS) - LENGTHS
    chosen = [generator.permutation(length)[: round(share * length)] for length in LENGTHS]
    masked = np.sort(np.concatenate([begin + places for begin, places in zip(begins, chosen, strict=True)]))
    tokens = generator.integers(5, sizes["vocab_size"], LENGTHS.sum())

    def compute(batch: dict[str, Any]) -> None:
        model(**batch).logits.square().mean().backward()
        model.zero_grad()

    found: dict[str, Callable[[], object]] = {}
    for how, only_masked in (("all tokens", False), ("those of the loss", True)):
        batch = Packing.for_model(model.config, only_masked=only_masked)((tokens, LENGTHS, masked, masked))
        del batch["labels"]
        found[f"{name}: {how}"] = partial(compute, batch)
    return found


def main() -> None:
    arguments = rounds.parser(__doc__, "out/masked_layer").parse_args()
    keep_freed_memory()  # as the recipes do
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = {way: run for name in CASES for way, run in ways(name).items()}
    rows = rounds.take_turns_on_cpu(made, arguments.rounds)
    pairs = {name: [f"{name}: {how}" for how in ("all tokens", "those of the loss")] for name in CASES}
    found = {" / ".join(pair): rounds.compare(rows, "cpu_ms", *pair) for pair in pairs.values()}
    rounds.save(arguments, "masked_layer", 1, rows, found)


if __name__ == "__main__":
    main()
