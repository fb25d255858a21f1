"""Measure recipes/token_classification.py beside transformers' Trainer with DataCollatorForTokenClassification.

    python benchmarks/tagging_peers.py --processes 2 --rounds 3 --output_dir out/tagging_peers

All train the same BERT (4 layers x 256, vocabulary 8,192) on the same windows of the embedded Python functions with the
same number of windows per update, fused AdamW, and a loss at the first token of each word. Trainer runs with random
batches, and tuned: grouped by length, with larger batches. They take turns; each turn is a new launch. Only real tokens
count. The start and the first update are left out. Writes tagging_cpu.json and tagging_cpu.md into the output folder.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import contestants, rounds, tags_and_pairs
from benchmarks.harness.encoder_and_texts import SIZES
from benchmarks.harness.launching import ROOT, flag_words, launch, logged_steps, run_job
from shared.tagging import demo_sources

MAX_LENGTH, LEARNING_RATE = 128, 5e-4
WARMUP = 1  # updates that are left out at the start
OURS, PEER, TUNED_PEER = "recipes/token_classification.py", "Trainer", "Trainer, group_by_length"
LABELS = {OURS: "ours", PEER: "trainer", TUNED_PEER: "trainer_tuned"}  # names of files
LAST_EVALUATION = 32  # texts; the recipe always ends with an evaluation, which is not measured


def recipe_flags(folder: Path) -> dict[str, object]:
    """The recipe's flags for data and model."""
    return tags_and_pairs.data_flags(folder) | {"max_length": MAX_LENGTH, "learning_rate": LEARNING_RATE}


def train_peer(job: SimpleNamespace) -> dict[str, float]:
    """Train one process of Trainer on the recipe's windows, in random order or, if tuned, grouped by length."""
    from transformers import (
        AutoModelForTokenClassification,
        DataCollatorForTokenClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from recipes import token_classification
    from shared.config import options

    words = flag_words(recipe_flags(Path(job.model)))
    train, *_, tokenizer = token_classification.load_data(options.parse(token_classification.Config, words))
    model = AutoModelForTokenClassification.from_pretrained(job.model)
    counter = contestants.Counter(model)

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counter.end_update()

    class TypicalUpdates(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            sampler = super()._get_train_sampler(train_dataset)
            if not job.tuned:
                return sampler
            size = job.rows * job.accumulation * dist.get_world_size()
            return contestants.typical_updates(list(sampler), train.lengths, size, job.steps, WARMUP, job.seed)

    arguments = TrainingArguments(
        output_dir=job.output_dir,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=job.accumulation,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        train_sampling_strategy="group_by_length" if job.tuned else "random",
        ddp_find_unused_parameters=False,
        ddp_backend="gloo",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )
    TypicalUpdates(
        model=model,
        args=arguments,
        train_dataset=tags_and_pairs.rows_of_words(train),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        callbacks=[EndOfUpdate()],
    ).train()
    return counter.result(WARMUP)


def measure(arguments: Any, folder: Path, name: str, round_: int) -> dict[str, Any]:
    """Launch one contestant; its figures of one round."""
    label, steps = f"{LABELS[name]}-{round_}", arguments.steps + WARMUP
    log, output = folder / f"{label}.log", folder / label
    if name != OURS:
        tuned = name == TUNED_PEER
        rows = arguments.tuned_rows if tuned else arguments.rows
        job = {"tuned": tuned, "rows": rows, "steps": steps, "seed": round_, "model": str(folder / "model")}
        job |= {"accumulation": arguments.global_batch_size // rows // arguments.processes}
        job |= {"output_dir": str(output), "result": str(folder / f"{label}.json")}
        file = folder / f"{label}.job"
        file.write_text(json.dumps(job))
        memory = launch(arguments.processes, log, __file__, "--job", file)
        return json.loads(Path(job["result"]).read_text()) | {"peak_rss_mib": memory}
    flags = recipe_flags(folder / "model") | {
        "global_batch_size": arguments.global_batch_size,
        "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
        "max_train_steps": steps,
        "logging_steps": 1,
        "eval_steps": steps,
        "checkpointing_steps": "no",
        "seed": round_,
        "expect_processes": arguments.processes,
        "output_dir": output,
    }
    memory = launch(arguments.processes, log, ROOT / OURS, *flag_words(flags))
    timed = logged_steps(output, WARMUP)
    update_seconds = [arguments.global_batch_size / line["samples_per_second"] for line in timed]
    tokens = sum(line["tokens_per_second"] * taken for line, taken in zip(timed, update_seconds, strict=True))
    seconds, samples = sum(update_seconds), arguments.global_batch_size * len(timed)
    row = {"tokens_per_second": tokens / seconds, "samples_per_second": samples / seconds, "padding_share": 0.0}
    return row | {"tokens_per_sample": tokens / samples, "seconds": seconds, "peak_rss_mib": memory}


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/tagging_peers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed updates per launch, after one of warm-up")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch of Trainer")
    parser.add_argument("--tuned_rows", type=int, default=16, help="the same for the tuned Trainer")
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048, help="the recipe's budget")
    parser.add_argument("--contestants", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--job", type=Path, help="file with the job of a process of Trainer's launch")
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job, train_peer)
        return
    for name in ("rows", "tuned_rows"):
        if arguments.global_batch_size % (getattr(arguments, name) * arguments.processes):
            parser.error(f"--global_batch_size must be a multiple of --{name} x --processes")
    folder = rounds.make_runs_folder(arguments.output_dir)
    train, validation = demo_sources.load()
    tables = (train, validation.slice(0, LAST_EVALUATION))
    tags_and_pairs.prepare("token_classification", folder / "model", tables, MAX_LENGTH, sizes=SIZES)
    rows = rounds.take_turns(arguments.contestants, arguments.rounds, lambda *turn: measure(arguments, folder, *turn))
    comparisons = {
        f"{what} of ours / {peer}": rounds.compare(rows, figure, OURS, peer)
        for what, figure in {"tokens per second": "tokens_per_second", "peak memory": "peak_rss_mib"}.items()
        for peer in (PEER, TUNED_PEER)
        if {OURS, peer} <= {*arguments.contestants}
    }
    rounds.save(arguments, "tagging_cpu", arguments.processes, rows, comparisons)


if __name__ == "__main__":
    main()
