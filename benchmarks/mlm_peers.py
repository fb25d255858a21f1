"""Measure recipes/mlm.py beside transformers' Trainer with DataCollatorForLanguageModeling: real tokens per second.

    python benchmarks/mlm_peers.py --processes 2 --rounds 3 --output_dir out/mlm_peers

Both train the same BERT (4 layers x 256, vocabulary 8,192) on the same pieces of docstrings with the same number of
pieces per update, fused AdamW, and 30 % of the tokens masked. They take turns; each turn is a new launch. Only real
tokens count. The start and the first update are left out. Writes mlm_cpu.json and mlm_cpu.md into the output folder.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import contestants, rounds
from benchmarks.harness.encoder_and_texts import SIZES
from benchmarks.harness.launching import ROOT, flag_words, launch, logged_steps, run_job

MAX_LENGTH, PROBABILITY = 512, 0.3
WARMUP = 1  # updates that are left out at the start
LABELS = {
    "ours": "recipes/mlm.py, fp32",
    "trainer": "Trainer with DataCollatorForLanguageModeling, fp32",
    "ours_bf16": "recipes/mlm.py, bf16",
    "trainer_bf16": "Trainer with DataCollatorForLanguageModeling, bf16",
    "trainer_tuned": "the same grouped by length, larger batches, fp32",
    "trainer_tuned_bf16": "the same grouped by length, larger batches, bf16",
}
RATE = "tokens_per_second"
PAIRS = (
    ("ours", "trainer"),
    ("ours", "trainer_tuned"),
    ("ours_bf16", "trainer"),
    ("ours_bf16", "trainer_bf16"),
    ("ours_bf16", "trainer_tuned_bf16"),
)


def recipe_flags(folder: Path) -> dict[str, object]:
    """The recipe's flags for data and model."""
    files = {"train_file": folder / "train.parquet", "validation_file": folder / "validation.parquet"}
    return files | {"model_name_or_path": folder, "max_length": MAX_LENGTH, "mlm_probability": PROBABILITY}


def prepare(folder: Path) -> None:
    """Write the model, its tokenizer and the texts; few to validate on, because that is not timed."""
    import pyarrow.parquet as pq
    import torch
    import transformers

    from shared.config.data_options import DataOptions
    from shared.datasets.documents import first_texts, load_documents
    from shared.text.tokenized import train_tokenizer

    train, validation = (first_texts(part, 1 << 30) for part in load_documents(DataOptions(), "text") if part)
    tokenizer = train_tokenizer(train, ("text",), "wordpiece", 8192, MAX_LENGTH)
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=8192, pad_token_id=tokenizer.pad_token_id, **dropout, **SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pq.write_table(train, folder / "train.parquet")
    pq.write_table(validation.slice(0, 32), folder / "validation.parquet")


def trainer(job: SimpleNamespace) -> dict[str, float]:
    """Train one process of transformers' Trainer on the recipe's pieces, random or, if tuned, grouped by length."""
    from transformers import (
        AutoModelForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from recipes import mlm
    from shared.config import options

    words = flag_words(recipe_flags(Path(job.model)))
    train, _, tokenizer = mlm.load_data(options.parse(mlm.Config, words))
    model = AutoModelForMaskedLM.from_pretrained(job.model)
    counter = contestants.Counter(model)

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counter.end_update()

    arguments = TrainingArguments(
        output_dir=job.output_dir,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=job.accumulation,
        optim="adamw_torch_fused",
        learning_rate=5e-4,
        bf16=job.contestant.endswith("_bf16"),
        train_sampling_strategy="group_by_length" if "tuned" in job.contestant else "random",
        ddp_find_unused_parameters=False,
        ddp_backend="gloo",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    pieces = [{"input_ids": train[i].tolist()} for i in range(len(train))]
    made = Trainer(model=model, args=arguments, train_dataset=pieces, data_collator=collator, callbacks=[EndOfUpdate()])
    if "tuned" in job.contestant:  # the longest pieces come first
        order, size = list(made._get_train_sampler(pieces)), job.rows * job.accumulation * dist.get_world_size()
        lengths = np.array([len(piece["input_ids"]) for piece in pieces])
        picked = contestants.typical_updates(order, lengths, size, job.steps, WARMUP, job.seed)
        made._get_train_sampler = lambda *_: picked
    made.train()
    return counter.result(WARMUP)


def race(arguments: argparse.Namespace, folder: Path, name: str, round_: int) -> dict[str, Any]:
    """Launch one contestant; its row of one round."""
    log, output = folder / f"{name}-{round_}.log", folder / f"{name}-{round_}"
    steps, model = arguments.steps + WARMUP, str(folder / "model")
    if name.startswith("trainer"):
        result = folder / f"{name}-{round_}.json"
        rows = arguments.tuned_rows if "tuned" in name else arguments.rows
        accumulation = arguments.global_batch_size // rows // arguments.processes
        job = {"contestant": name, "seed": round_, "result": str(result), "output_dir": str(output), "model": model}
        job |= {"steps": steps, "rows": rows, "accumulation": accumulation}
        result.with_suffix(".job").write_text(json.dumps(job))
        memory = launch(arguments.processes, log, __file__, "--job", result.with_suffix(".job"))
        return {"contestant": name, "round": round_, **json.loads(result.read_text()), "peak_rss_mib": memory}
    flags = recipe_flags(folder / "model") | {
        "global_batch_size": arguments.global_batch_size,
        "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
        "max_train_steps": steps,
        "learning_rate": 5e-4,
        "mixed_precision": "bf16" if name == "ours_bf16" else "no",
        "logging_steps": 1,
        "eval_steps": steps,
        "checkpointing_steps": "no",
        "seed": round_,
        "expect_processes": arguments.processes,
        "output_dir": output,
    }
    memory = launch(arguments.processes, log, ROOT / "recipes/mlm.py", *flag_words(flags))
    timed = logged_steps(output, WARMUP)
    seconds = sum(arguments.global_batch_size / line["samples_per_second"] for line in timed)
    tokens = sum(line["tokens_per_second"] / line["samples_per_second"] for line in timed) * arguments.global_batch_size
    samples = arguments.global_batch_size * len(timed)
    row = {"tokens_per_second": tokens / seconds, "samples_per_second": samples / seconds, "padding_share": 0.0}
    row |= {"tokens_per_sample": tokens / samples, "seconds": seconds, "peak_rss_mib": memory}
    return {"contestant": name, "round": round_, **row}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| contestant | real tokens/s | padding | peak memory per process |", "|---|---:|---:|---:|"]
    for name, label in LABELS.items():
        if mine := [row for row in report["rows"] if row["contestant"] == name]:
            middle = {key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "contestant"}
            lines.append(
                f"| {label} | {middle['tokens_per_second']:,.0f} | {middle['padding_share']:.1%} | "
                f"{middle['peak_rss_mib']:,.0f} MiB |"
            )
    lines += ["", "| ratio of real tokens/s | median of rounds (min-max) |", "|---|---:|"]
    for pair, each in report["ratios"].items():
        lines.append(f"| {pair} | {statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f}) |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed updates per launch, after one of warm-up")
    parser.add_argument("--global_batch_size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch of Trainer")
    parser.add_argument("--tuned_rows", type=int, default=16, help="the same for the tuned Trainer")
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048, help="the recipe's budget")
    parser.add_argument("--contestants", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--output_dir", type=Path, default=Path("out/mlm_peers"))
    parser.add_argument("--job", type=Path, help="file with the job of a process of Trainer's launch")
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job, trainer)
        return
    folder = rounds.make_runs_folder(arguments.output_dir)
    prepare(folder / "model")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    report: dict[str, Any] = {
        "machine": rounds.machine(arguments.processes),
        "command": rounds.command(),
        "settings": settings,
        "rows": [],
    }
    for round_, name in rounds.turns(arguments.contestants, arguments.rounds):
        row = race(arguments, folder, name, round_)
        report["rows"].append(row)
        print(f"round {round_} {name:14} {row['tokens_per_second']:8,.0f} tokens/s", flush=True)
        ratios = {f"{one} / {other}": rounds.by_round(report["rows"], one, other, RATE) for one, other in PAIRS}
        report["ratios"] = {pair: each for pair, each in ratios.items() if each}
        (arguments.output_dir / "mlm_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output_dir / "mlm_cpu.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
