"""Measure `recipes/nlp.py --packing` on a CPU: the passes of a step over packed texts and over padded rows.

    python benchmarks/packing.py --output_dir out/packing

The encoder (4 layers x 256) and the docstrings are those of nlp_peers.py; the model is adapted as in the recipe. Packed
and padded take turns in one process of one thread, on the same texts in each round. CPU seconds are compared, because
other processes disturb them less than the time that passes. Writes packing.json and packing.md.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, rounds

MAX_TOKENS = 1024  # of a micro-batch
PRECISIONS = {"fp32": "no", "bf16": "bf16"}
WAYS = ("padded", "packed")


def passes_of_steps(
    folder: Path,
    steps: Sequence[int],
    precisions: Sequence[str] = tuple(PRECISIONS),
    texts: int | None = None,
    **sizes: int,
) -> dict[str, Callable[[int], rounds.Row]]:
    """Functions that make the passes of a step of that number, by "precision, texts of a step, way".

    Args:
        folder: for the encoder and the texts.
        steps: texts of a step. Among fewer texts there are fewer of similar length, and so more padding.
        precisions: keys of PRECISIONS.
        texts: use the first so many; None: all.
        sizes: fields of BertConfig; default: those of nlp_peers.py.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from recipes.nlp import Config
    from shared.config.options import Options
    from shared.datasets.labels import load_labeled
    from shared.encoders.packed_texts import pack_or_pad_texts
    from shared.encoders.text_models import adapt_to_device
    from shared.plan.batches import Plan
    from shared.text.tokenized import tokenize

    prepared = encoder_and_texts.prepare(folder, 0, texts, sizes=sizes or None)
    tokenizer = AutoTokenizer.from_pretrained(prepared["encoder"])
    files = {"train_file": (prepared["files"]["train_file"],), "validation_file": (prepared["files"]["eval"],)}
    longest = encoder_and_texts.MAX_LENGTH
    table, _, labels = load_labeled(Config(**files))
    data = tokenize(table, ("text",), tokenizer, longest).with_targets(labels.encode(table))
    made: dict[str, Callable[[int], rounds.Row]] = {}
    for name in precisions:
        precision = PRECISIONS[name]
        accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision=precision)
        for way in WAYS:
            model = AutoModelForSequenceClassification.from_pretrained(prepared["encoder"])
            model = adapt_to_device(accelerator, Options(), model).train()  # type: ignore[arg-type]
            settings = {"packing": way == "packed", "mixed_precision": precision, "activation_dtype": None}
            config = SimpleNamespace(**settings, max_length=longest)
            collate, _ = pack_or_pad_texts(model, data, data, tokenizer, accelerator, config)
            assert collate.packed == config.packing
            lengths = collate.padded_lengths(data.lengths)
            for size in steps:
                plan = Plan(
                    lengths=lengths,
                    packed=collate.packed,
                    seed=0,
                    global_batch_size=size,
                    num_epochs=100,
                    max_tokens=MAX_TOKENS,
                )
                made[f"{name}, {size} texts, {way}"] = partial(passes, model, data, collate, plan, precision == "bf16")
    return made


def passes(model: Any, data: Any, collate: Any, plan: Any, bf16: bool, step: int) -> rounds.Row:
    """The forward and backward passes of a step: CPU seconds, seconds, real tokens, share of padding, loss."""
    loss, cut = torch.zeros(()), plan.cut(step)
    tokens = sum(int(data.lengths[each.samples].sum()) for each in cut)
    positions = 0
    started, wall = time.process_time(), time.perf_counter()
    for each in cut:
        batch = collate(data.read_micro_batch(each.samples, each.epochs))
        targets = batch.pop("labels")
        positions += batch["input_ids"].numel()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            part = F.cross_entropy(model(**batch).logits.float(), targets, reduction="sum") / each.normalizer
        part.backward()
        loss += part.detach()
    figures = {"cpu_seconds": time.process_time() - started, "seconds": time.perf_counter() - wall}
    for parameter in model.parameters():
        parameter.grad = None
    rate = tokens / figures["cpu_seconds"]
    return figures | {"tokens_per_cpu_second": rate, "padding_share": 1 - tokens / positions, "loss": loss.item()}


def main() -> None:
    parser = rounds.parser(__doc__, "out/packing")
    parser.add_argument("--steps", nargs="+", type=int, default=[256, 32], help="texts of a step, one or more numbers")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = passes_of_steps(rounds.make_runs_folder(arguments.output_dir), arguments.steps, arguments.precisions)
    for name in made:
        if f", {min(arguments.steps)} texts, " in name:  # the first passes of a model allocate memory
            made[name](0)
    # Padded and packed passes of the same work follow each other, because the machine changes over time.
    names = sorted(made, key=lambda name: name.rpartition(", ")[0])
    rows = rounds.take_turns(names, arguments.rounds, lambda name, round_: made[name](round_ + 1))
    pairs = {name.removesuffix(", packed"): name for name in made if name.endswith("packed")}
    comparisons = {
        f"speed of packed / padded, {work}": rounds.compare(rows, "tokens_per_cpu_second", packed, f"{work}, padded")
        for work, packed in pairs.items()
    }
    rounds.save(arguments, "packing", 1, rows, comparisons)


if __name__ == "__main__":
    main()
