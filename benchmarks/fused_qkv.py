"""Measure --fused_qkv on a CPU: query, key and value by one matrix product or by three, in turns.

    python benchmarks/fused_qkv.py --rounds 7

A round is the CPU time of a forward and backward pass over 8 rows of 128 tokens, without optimizer, in one thread, in
float32, for the encoders of SIZES. Writes fused_qkv.json and fused_qkv.md into the output folder.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, rounds
from shared.models.fused_qkv import fuse, triples

SIZES = {
    "4x256": encoder_and_texts.SIZES,
    "2x768": {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072},
}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def ways(encoders: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Functions that make a pass of these encoders, by name."""
    ids = torch.randint(8192, (8, 128), generator=torch.Generator().manual_seed(0))
    found: dict[str, Callable[[], object]] = {}
    for size in encoders:
        sizes = SIZES[size]
        three = BertModel(BertConfig(vocab_size=8192, **WITHOUT_DROPOUT, **sizes), add_pooling_layer=False).train()
        one = copy.deepcopy(three)
        for layers in triples(one):
            fuse(*layers)
        found |= {f"BERT {size}, {name}": partial(compute, m, ids) for name, m in (("three", three), ("one", one))}
    return found


def compute(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """A forward and backward pass."""
    model(input_ids=ids).last_hidden_state.square().mean().backward()
    model.zero_grad()


def main() -> None:
    parser = rounds.parser(__doc__, "out/fused_qkv")
    parser.add_argument("--encoders", nargs="+", choices=list(SIZES), default=list(SIZES), help="layers x width")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = ways(arguments.encoders)
    rows = rounds.take_turns_on_cpu(made, arguments.rounds)
    pairs = [(name, name.removesuffix("three") + "one") for name in made if name.endswith("three")]
    found = {f"{three} / {one}": rounds.compare(rows, "cpu_ms", three, one) for three, one in pairs}
    rounds.save(arguments, "fused_qkv", 1, rows, found)


if __name__ == "__main__":
    main()
