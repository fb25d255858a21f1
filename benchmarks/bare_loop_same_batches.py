"""Measure recipes/nlp.py beside a bare DDP loop on the same micro-batches: speed, and weights equal to the bit.

    python benchmarks/bare_loop_same_batches.py --processes 2 --rounds 5 --output_dir out/bare_loop_same_batches

Both train in the same processes from the same weights. They run in two threads that take turns: one optimizer step of
one, then the same step of the other, so that a machine that slows down slows both. The recipe is `main` of
recipes/nlp.py with --no_packing, because the bare loop pads. This loop is plain PyTorch; it reads the samples that the
plan names through a DataLoader. Its model is the recipe's, with its last layer and products, because the loops are
compared here. The figure of a round is the median of the ratios of the steps. After each round the weights of both have
to be equal to the bit. Writes bare_loop_same_batches.json and bare_loop_same_batches.md into the output folder.
"""

import gc
import statistics
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import alternating_loops, rounds
from benchmarks.harness.encoder_and_texts import MAX_LENGTH, prepare
from benchmarks.harness.launching import flag_words

LEARNING_RATE = 1e-4


def ours(job: SimpleNamespace, round_: int) -> None:
    """Train with the recipe."""
    from recipes import nlp
    from shared.config import options

    nlp.main(options.parse(nlp.Config, [*job.flags, "--output_dir", f"{job.folder}/ours-{round_}"]))


def bare(job: SimpleNamespace, round_: int) -> None:
    """Train with plain PyTorch on the plan's micro-batches."""
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

    from recipes import nlp
    from shared.config import options
    from shared.models.linear_layers import use_fast_products
    from shared.plan.batches import Plan
    from shared.speed.first_token import shorten_last_layer

    config = options.parse(nlp.Config, job.flags)
    train, _, _, tokenizer = nlp.load_data(config)
    assert train.targets is not None
    rows: Any = [{"input_ids": train[i][0].tolist(), "labels": int(train.targets[i])} for i in range(len(train))]
    plan = Plan(
        lengths=train.lengths,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        max_steps=config.max_train_steps,
        max_tokens=config.max_tokens_per_micro_batch,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
    )
    schedule = [plan.micro_batches(step) for step in range(job.steps)]
    order = [m.samples.tolist() for mine in schedule for m in mine]
    loader = torch.utils.data.DataLoader(rows, batch_sampler=order, collate_fn=DataCollatorWithPadding(tokenizer))
    classifier = AutoModelForSequenceClassification.from_pretrained(config.model_name_or_path).train()
    shorten_last_layer(classifier)
    use_fast_products(classifier)
    model = nn.parallel.DistributedDataParallel(classifier)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    batches = iter(loader)
    for mine in schedule:
        for micro_batch in mine:
            with nullcontext() if micro_batch.last else model.no_sync():
                batch = next(batches)
                losses = F.cross_entropy(model(**batch_without_labels(batch)).logits, batch["labels"], reduction="none")
                (losses.sum() / micro_batch.step_size * dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def batch_without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of the model's forward pass."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


LOOPS = {"ours": ours, "bare": bare}


def work(job: SimpleNamespace) -> list[dict[str, Any]]:
    """Run all rounds as one process of the launch; the rows of the report."""
    rows = []
    for round_ in range(job.rounds):
        calls = {name: partial(loop, job, round_) for name, loop in LOOPS.items()}
        done = alternating_loops.race(calls, job.steps, first=[*LOOPS][round_ % 2])
        timed = {name: loop.seconds[1:] for name, loop in done.items()}  # the first one includes the start
        ratio = alternating_loops.ratio(timed["bare"], timed["ours"])
        equal = all(map(torch.equal, done["ours"].weights, done["bare"].weights))
        for name, seconds in timed.items():
            middle = statistics.median(seconds)
            rows.append({"contestant": name, "round": round_, "step_seconds": middle, "ratio": ratio, "equal": equal})
        del done
        gc.collect()
    return rows


def main() -> None:
    parser = rounds.parser(__doc__, "out/bare_loop_same_batches")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="steps of each round; the first is left out")
    parser.add_argument("--global_batch_size", type=int, default=32)
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048)
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    parser.add_argument("--job", type=Path, help="file with the job of a process of the launch")
    arguments = parser.parse_args()
    if arguments.job:
        alternating_loops.serve(arguments.job, work)
    folder = rounds.make_runs_folder(arguments.output_dir)
    prepared = prepare(folder, 0, arguments.texts)
    flags = {
        "model_name_or_path": prepared["encoder"],
        "train_file": prepared["files"]["train_file"],
        "validation_file": prepared["files"]["nlp"],
        "max_length": MAX_LENGTH,
        "global_batch_size": arguments.global_batch_size,
        "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
        "max_train_steps": arguments.steps + 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "mixed_precision": "no",
        "packing": False,
    }
    job = {
        "flags": flag_words(flags),
        "folder": str(folder),
        "rounds": arguments.rounds,
        "steps": arguments.steps,
    }
    rows = alternating_loops.rows_of(__file__, arguments.processes, folder, job)
    ratio = rounds.summary([row["ratio"] for row in rows if row["contestant"] == "ours"])
    equal = rounds.summary([float(row["equal"]) for row in rows if row["contestant"] == "ours"])
    found = {"speed of ours / bare": ratio, "rounds with weights equal to the bit": equal}
    rounds.save(arguments, "bare_loop_same_batches", arguments.processes, rows, found)
    if not all(row["equal"] for row in rows):
        sys.exit("the weights of the recipe and of the bare loop differ")


if __name__ == "__main__":
    main()
