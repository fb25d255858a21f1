"""Measure what single techniques of the recipes gain, each in turns with what it replaces, in two processes.

    torchrun --nproc-per-node 2 benchmarks/techniques.py --output_dir out/techniques

The model is the BERT of nlp_peers.py (4 layers x 256) unless a row names another one, in float32, with one thread per
process. The script compares: the update of AdamW (fused, in groups, parameter by parameter); a forward and backward
pass under DDP, whose gradients are views of its buckets or copies; a forward and backward pass of classifiers whose
last layer computes the first token only or all tokens. It also measures the import of libraries that the recipes import
late or never. Writes techniques.json and techniques.md into the output folder.
"""

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, rounds
from shared.launch.starting import keep_freed_memory
from shared.models.first_token import shorten_last_layer

PAIRS = (
    ("update, in groups", "update, fused"),
    ("update, one by one", "update, fused"),
    ("step, gradients copied", "step, gradients in buckets"),
    ("BERT 4 x 256, every token", "BERT 4 x 256, first token"),
    ("DistilBERT, every token", "DistilBERT, first token"),
    ("ViT-B/16, every token", "ViT-B/16, first token"),
)
DISTILBERT: dict[str, int] = {}  # sizes; transformers' defaults are those of the published models
VIT: dict[str, int] = {}
LATE = ("evaluate", "wandb", "matplotlib.pyplot", "datasets")


def updates(model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Functions that make ten updates of AdamW, by name."""
    ways: dict[str, dict[str, Any]] = {
        "update, fused": {"fused": True},
        "update, in groups": {"foreach": True},
        "update, one by one": {"foreach": False},
    }

    def ten(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(10):
            optimizer.step()

    made: dict[str, Callable[[], object]] = {}
    for name, how in ways.items():
        parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **how)
        made[name] = partial(ten, optimizer)
    return made


def steps(model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Functions that make a forward and backward pass over 8 rows of 128 tokens, with an all-reduce, by name."""
    ids = torch.randint(8192, (8, 128), generator=torch.Generator().manual_seed(0))

    def step(wrapped: DistributedDataParallel) -> None:
        wrapped(input_ids=ids).logits.square().mean().backward()
        for parameter in wrapped.parameters():
            parameter.grad = None

    return {
        name: partial(step, DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view))
        for name, view in {"step, gradients in buckets": True, "step, gradients copied": False}.items()
    }


def last_layers(bert: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Functions that make forward and backward passes of classifiers, over texts or a picture of 224 x 224, by name."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(8192, shape, generator=generator) for shape in ((16, 64), (4, 256), (2, 512))]
    distilbert = transformers.DistilBertConfig(vocab_size=8192, dropout=0.0, attention_dropout=0.0, **DISTILBERT)
    models = {
        "BERT 4 x 256": (bert, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]),
        "DistilBERT": (transformers.DistilBertForSequenceClassification(distilbert), [{"input_ids": texts[1][:2]}]),
        "ViT-B/16": (
            transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)),
            [{"pixel_values": torch.rand(1, 3, 224, 224, generator=generator)}],
        ),
    }

    def compute(classifier: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
        for batch in batches:
            classifier(**batch).logits.square().mean().backward()

    ways: dict[str, Callable[[], object]] = {}
    for name, (whole, batches) in models.items():
        short = copy.deepcopy(whole)
        shorten_last_layer(short)
        ways |= {f"{name}, every token": partial(compute, whole.train(), batches)}
        ways |= {f"{name}, first token": partial(compute, short.train(), batches)}
    return ways


def import_seconds(package: str) -> float:
    """Seconds that the import of a package takes after torch and transformers."""
    code = f"import time, torch, transformers; t = time.perf_counter(); import {package}; print(time.perf_counter()-t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    arguments = rounds.parser(__doc__, "out/techniques").parse_args()
    keep_freed_memory()  # as the recipes do
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8192, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **encoder_and_texts.SIZES
    )
    model = transformers.BertForSequenceClassification(config)
    ways = updates(model) | steps(model) | last_layers(model)
    for run in ways.values():  # the first call warms up
        run()

    def timed(name: str, _: int) -> rounds.Row:
        dist.barrier()
        started = time.perf_counter()
        ways[name]()
        return {"ms": 1e3 * (time.perf_counter() - started)}

    if rows := rounds.take_turns_in_group(list(ways), arguments.rounds, timed):
        found = {f"{slow} / {fast}": rounds.compare(rows, "ms", slow, fast) for slow, fast in PAIRS}
        for package in LATE:
            seconds = [import_seconds(package) for _ in range(arguments.rounds)]
            found[f"import {package} (s)"] = rounds.summary(seconds)
        rounds.save(arguments, "techniques", 2, rows, found)


if __name__ == "__main__":
    main()
