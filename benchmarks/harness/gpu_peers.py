"""Train transformers' Trainer, tuned as far as its flags allow, on the texts of the benchmark "fine_tuning"."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.gpu_benchmarks import LOGGING_STEPS, Benchmark


class Rates:
    """Counts real tokens on the device, so that the host does not wait, and writes a line every few updates."""

    def __init__(self, model: torch.nn.Module, every: int, output: Path) -> None:
        self.every, self.output = every, output
        self.device = next(model.parameters()).device
        self.tokens = self.rows = torch.zeros((), device=self.device)
        self.updates = 0
        self.started = time.perf_counter()
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: torch.nn.Module, _: Any, batch: dict[str, Any]) -> None:
        self.tokens = self.tokens + batch["attention_mask"].sum().to(self.device)
        self.rows = self.rows + len(batch["attention_mask"])

    def end_update(self) -> None:
        """Count an update; after every `every` updates, wait for the device and write the rates since the last line."""
        self.updates += 1
        if self.updates % self.every:
            return
        tokens, rows = float(self.tokens), float(self.rows)
        seconds = time.perf_counter() - self.started
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        line = {"step": self.updates, "loss": None, "samples_per_second": rows / seconds, "peak_memory_bytes": peak}
        line |= {"tokens_per_second": tokens / seconds, "step_seconds": seconds / self.every}
        with self.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.tokens, self.rows = self.tokens * 0, self.rows * 0
        self.started = time.perf_counter()


def train(benchmark: Benchmark, folder: Path, toy: bool) -> None:
    """Train with the flags of `benchmark` and write FOLDER/run/metrics.jsonl, with lines like those of a recipe."""
    import pyarrow.parquet as pq
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    flags = benchmark.flags | (benchmark.toy if toy else {})
    steps = 4 if toy else benchmark.steps
    table = pq.read_table(folder / "short.parquet")
    names = sorted(set(table["label"].to_pylist()))
    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    encoded = tokenizer(table["text"].to_pylist(), truncation=True, max_length=flags["max_length"])
    labels = [names.index(label) for label in table["label"].to_pylist()]
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(encoded["input_ids"], encoded["attention_mask"], labels, strict=True)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "encoder", dtype=torch.float32)
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=flags["global_batch_size"],
        learning_rate=flags["learning_rate"],
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0 if toy else 4,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would read each loss, and so wait for the GPU
        accelerator_config={"non_blocking": True},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    (folder / "run").mkdir()
    (folder / "facts.json").write_text(json.dumps({"operations": 0.0, "samples": len(rows)}))

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rates.end_update()

    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    trainer = Trainer(model=model, args=settings, train_dataset=rows, data_collator=collator, callbacks=[EndOfUpdate()])
    rates = Rates(trainer.model, 1 if toy else LOGGING_STEPS, folder / "run/metrics.jsonl")
    trainer.train()
