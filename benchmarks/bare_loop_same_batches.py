"""Measure recipes/nlp.py beside a bare DDP loop on the same micro-batches: speed, and weights equal to the bit.

    python benchmarks/bare_loop_same_batches.py --processes 2 --rounds 5 --output_dir out/bare_loop_same_batches

Both train in the same processes from the same weights. They run in two threads that take turns: one optimizer step of
one, then the same step of the other. A disturbance of the machine then hits both, whether it takes a tenth of a second
or a minute, and their ratio is known to a few thousandths. The recipe is `main` of recipes/nlp.py with --no_packing,
because the bare loop pads. This loop is plain PyTorch; it reads the samples that the plan names through a DataLoader.
Its model is the recipe's, with its last layer and products, because the loops are compared here. The figure of a round
is the median of the ratios of the steps. After each round the weights of both have to be equal to the bit. Writes
bare_loop_same_batches.json and bare_loop_same_batches.md into the output folder.
"""

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, rounds
from benchmarks.harness.encoder_and_texts import MAX_LENGTH, prepare

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
                labels = batch.pop("labels")
                losses = F.cross_entropy(model(**batch).logits, labels, reduction="none")
                (losses.sum() / micro_batch.step_size * dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {"ours": ours, "bare": bare}


class LastStepDone(Exception):
    """Raised from the optimizer's hook after the last step; it ends any loop."""


class Loop:
    """A training loop that waits after each optimizer step until the `other` loop has made the same step."""

    other: "Loop"

    def __init__(self, call: Callable[[], None], steps: int) -> None:
        self.call, self.steps = call, steps
        self.turn = threading.Semaphore(0)
        self.seconds: list[float] = []  # of each step; the first one includes the start
        self.weights: list[Tensor] = []  # after the last step
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Run the loop from its start to its last step."""
        self.turn.acquire()
        self.thread, self.resumed = threading.get_ident(), time.perf_counter()
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            self.call()
        except LastStepDone:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            handle.remove()
            self.other.turn.release(self.steps + 1)  # it waits no more

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self.seconds.append(time.perf_counter() - self.resumed)
        if len(self.seconds) == self.steps:
            self.weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            raise LastStepDone
        self.other.turn.release()
        self.turn.acquire()
        self.resumed = time.perf_counter()


def race(job: SimpleNamespace, round_: int) -> list[Loop]:
    """Run both loops in turns, the first of LOOPS in this thread; another one begins in each round."""
    loops = [Loop(partial(loop, job, round_), job.steps) for loop in LOOPS.values()]
    mine, beside = loops
    mine.other, beside.other = beside, mine
    loops[round_ % 2].turn.release()
    thread = threading.Thread(target=beside.run, daemon=True)
    thread.start()
    mine.run()
    thread.join()
    for loop in loops:
        if loop.failure:
            raise loop.failure
        assert len(loop.seconds) == job.steps, f"a loop ended after {len(loop.seconds)} steps"
    return loops


def work(file: Path) -> None:
    """Run all rounds as one process of the launch; the main process writes the rows of the report beside the job."""
    dist.init_process_group("gloo")
    job, rows = SimpleNamespace(**json.loads(file.read_text())), []
    for round_ in range(job.rounds):
        both = race(job, round_)
        timed = [loop.seconds[1:] for loop in both]
        ratio = statistics.median(theirs / mine for mine, theirs in zip(*timed, strict=True))
        equal = all(map(torch.equal, *(loop.weights for loop in both)))
        for name, seconds in zip(LOOPS, timed, strict=True):
            middle = statistics.median(seconds)
            rows.append({"contestant": name, "round": round_, "step_seconds": middle, "ratio": ratio, "equal": equal})
        del both
        gc.collect()
    if dist.get_rank() == 0:
        file.with_suffix(".rows").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)


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
        work(arguments.job)
    folder = rounds.make_runs_folder(arguments.output_dir)
    flags = prepare(folder, arguments.texts) | {
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
    job = {"flags": launching.flag_words(flags), "folder": str(folder)}
    file = folder / "loops.job"
    file.write_text(json.dumps(job | {"rounds": arguments.rounds, "steps": arguments.steps}))
    # With glibc's default the second thread gets an arena of its own, whose memory is unlike the main thread's.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    launching.launch(arguments.processes, folder / "log", __file__, "--job", file)
    rows = json.loads(file.with_suffix(".rows").read_text())
    ratio = rounds.summary([row["ratio"] for row in rows if row["contestant"] == "ours"])
    equal = rounds.summary([float(row["equal"]) for row in rows if row["contestant"] == "ours"])
    found = {"speed of ours / bare": ratio, "rounds with weights equal to the bit": equal}
    rounds.save(arguments, "bare_loop_same_batches", arguments.processes, rows, found)
    if not all(row["equal"] for row in rows):
        sys.exit("the weights of the recipe and of the bare loop differ")


if __name__ == "__main__":
    main()
