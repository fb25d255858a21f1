"""What some techniques of the recipes gain by themselves, each in turns with what it replaces, in two processes.

    torchrun --nproc-per-node 2 benchmarks/techniques.py --output_dir out/techniques

The model is the BERT of peers.py (4 layers x 256), in float32, one thread per process. What is compared:
the update of AdamW (fused, in groups, parameter by parameter); a forward and backward pass under DDP, whose gradients
are views of its buckets or not; a forward and backward pass over packed documents, whose attention is called once per
length or over all, padded to the longest; one over texts, whose last layer computes the first token only or all of
them; and what importing libraries takes that the recipes import late or not at all. Leaves techniques.json and
techniques.md.
"""

import contextlib
import copy
import io
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

import peers
import rounds

from shared.batches import Plan
from shared.first_token import shorten_last_layer
from shared.masked_head import predict_only_masked
from shared.packing import Packing, use_packed_attention

PAIRS = (
    ("update, in groups", "update, fused"),
    ("update, one by one", "update, fused"),
    ("step, gradients copied", "step, gradients in buckets"),
    ("packed, padded", "packed, by length"),
    ("last layer, every token", "last layer, first token"),
)
LATE = ("evaluate", "wandb", "matplotlib.pyplot", "datasets")
BUDGET, LONGEST = 2048, 512  # tokens of the packed row, and of a document


def updates(model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Ten updates of AdamW, by the name of how."""
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
    """A forward and backward pass over 8 rows of 128 tokens with an all-reduce of the gradients, which are dropped."""
    ids = torch.randint(8192, (8, 128), generator=torch.Generator().manual_seed(0))

    def step(wrapped: DistributedDataParallel) -> None:
        wrapped(input_ids=ids).logits.square().mean().backward()
        for parameter in wrapped.parameters():
            parameter.grad = None

    return {
        name: partial(step, DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view))
        for name, view in {"step, gradients in buckets": True, "step, gradients copied": False}.items()
    }


def last_layers(model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Forward and backward passes of a classifier over three micro-batches of short, middle and long texts."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(8192, shape, generator=generator) for shape in ((16, 64), (4, 256), (2, 512))]

    def compute(classifier: torch.nn.Module) -> None:
        for ids in batches:
            classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.square().mean().backward()

    short = copy.deepcopy(model)
    shorten_last_layer(short)
    return {
        "last layer, every token": partial(compute, copy.deepcopy(model)),
        "last layer, first token": partial(compute, short),
    }


def passes(config: transformers.BertConfig) -> dict[str, Callable[[], object]]:
    """Forward and backward passes over three micro-batches of documents, cut as the recipe does."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(np.exp(generator.normal(5, 1, 64)).astype(np.int64) + 4, LONGEST)
    plan = Plan(lengths=lengths, packed=True, seed=0, global_batch_size=64, num_epochs=1, max_tokens=BUDGET)
    batches = []
    for piece in plan.cut(0)[1::3]:
        tokens = generator.integers(5, 8192, lengths[piece.samples].sum())
        masked = np.arange(0, len(tokens), 3)
        batch = Packing.for_model(config)((tokens, lengths[piece.samples], masked, tokens[masked]))
        batches.append({name: value for name, value in batch.items() if name != "labels"})

    def compute(model: torch.nn.Module) -> None:
        for batch in batches:
            model(**batch).logits.square().mean().backward()

    made: dict[str, Callable[[], object]] = {}
    for name, padded in (("packed, by length", False), ("packed, padded", True)):
        model = transformers.BertForMaskedLM(config)
        predict_only_masked(model)
        use_packed_attention(model, torch.device("cpu"), "no", compiled=padded)
        made[name] = partial(compute, model)
    return made


def import_seconds(package: str) -> float:
    """What importing a package takes in a process that has torch and transformers."""
    code = f"import time, torch, transformers; t = time.perf_counter(); import {package}; print(time.perf_counter()-t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    arguments = rounds.parser(__doc__, "out/techniques").parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8192, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **peers.SIZES
    )
    model = transformers.BertForSequenceClassification(config)
    ways = updates(model) | steps(model) | last_layers(model) | passes(config)
    for run in ways.values():  # the first call has more to do
        run()

    def timed(name: str, _: int) -> rounds.Row:
        dist.barrier()
        started = time.perf_counter()
        ways[name]()
        return {"ms": 1e3 * (time.perf_counter() - started)}

    main_process = dist.get_rank() == 0
    with contextlib.nullcontext() if main_process else contextlib.redirect_stdout(io.StringIO()):
        rows = rounds.take_turns(list(ways), arguments.rounds, timed)
    dist.barrier()
    dist.destroy_process_group()
    if main_process:
        found = {f"{slow} / {fast}": rounds.compare(rows, "ms", slow, fast) for slow, fast in PAIRS}
        for package in LATE:
            seconds = [import_seconds(package) for _ in range(arguments.rounds)]
            found[f"import {package} (s)"] = rounds.summary(seconds)
        rounds.save(arguments, "techniques", 2, rows, found)


if __name__ == "__main__":
    main()
