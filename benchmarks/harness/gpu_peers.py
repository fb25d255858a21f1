"""What a user could run instead of a recipe.

transformers' Trainer, tuned as far as its flags allow; the trainer of sentence-transformers; a bare loop.
"""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import tags_and_pairs
from benchmarks.harness.gpu_benchmarks import BENCHMARKS, LOGGING_STEPS, Benchmark
from benchmarks.harness.peer_loops import end_of_update
from benchmarks.harness.random_documents import random_rows, word_tokenizer
from shared.encoders.text_models import new_encoder


class Rates:
    """Writes the rates of every few updates as lines like those of a recipe's metrics.jsonl.

    Args:
        device: the one that is waited for before the clock is read.
        folder: for the lines, in FOLDER/run/metrics.jsonl.
        toy: a line for each update.
        update: rows and tokens of an update; None where they vary: then `watch` counts them on the device.
    """

    def __init__(self, device: torch.device, folder: Path, toy: bool, update: tuple[int, int] | None = None) -> None:
        self.device, self.output, self.update = device, folder / "run/metrics.jsonl", update
        self.every = 1 if toy else LOGGING_STEPS
        self.rows = self.tokens = torch.zeros((), device=device)
        self.updates = 0
        self.started = time.perf_counter()

    def watch(self, model: nn.Module) -> None:
        """Count real tokens and rows as they enter the model, without a wait of the host; not for a compiled model."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: nn.Module, _: Any, batch: dict[str, Any]) -> None:
        self.tokens = self.tokens + batch["attention_mask"].sum().to(self.device)
        self.rows = self.rows + len(batch["attention_mask"])

    def end_update(self) -> None:
        """Count an update; after every `every` updates, wait for the device and write the rates since the last line."""
        self.updates += 1
        if self.updates % self.every:
            return
        rows, tokens = float(self.rows), float(self.tokens)  # waits for the device
        if self.update:
            rows, tokens = (self.every * each for each in self.update)
        seconds = time.perf_counter() - self.started
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        line = {"step": self.updates, "loss": None, "samples_per_second": rows / seconds, "peak_memory_bytes": peak}
        line |= {"tokens_per_second": tokens / seconds, "step_seconds": seconds / self.every}
        with self.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.rows, self.tokens = self.rows * 0, self.tokens * 0
        self.started = time.perf_counter()


def train(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """Train the work of `benchmark` and write FOLDER/run/metrics.jsonl, with lines like those of a recipe.

    Args:
        benchmark: its `recipe` is "trainer", "sentence-transformers" or "bare loop".
        config: the settings of the recipe that does this work, resolved from the benchmark's flags.
        folder: has the texts and the model, except for pretraining.
        toy: without a GPU.
    """
    (folder / "run").mkdir()
    if benchmark.recipe == "bare loop":
        train_bare(benchmark, config, folder, toy)
    elif benchmark.recipe == "sentence-transformers":
        embed(benchmark, config, folder, toy)
    elif BENCHMARKS[benchmark.beside].recipe == "token_classification":
        tag(benchmark, config, folder, toy)
    elif "train_file" in benchmark.flags:
        fine_tune(benchmark, config, folder, toy)
    else:
        pretrain(benchmark, config, folder, toy)


def arguments(benchmark: Benchmark, config: Any, folder: Path, toy: bool, kind: Any = None, **more: Any) -> Any:
    """transformers' TrainingArguments for speed; `kind` is a subclass of it."""
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        output_dir=str(folder / "trainer"),
        max_steps=4 if toy else benchmark.steps,
        per_device_train_batch_size=config.global_batch_size,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would read each loss, and so wait for the GPU
        accelerator_config={"non_blocking": True},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def run_trainer(model: Any, settings: Any, data: Any, collator: Any, rates: Rates) -> None:
    """Train; `rates` hears of each update."""
    from transformers import Trainer

    callbacks = [end_of_update(rates.end_update)]
    Trainer(model=model, args=settings, train_dataset=data, data_collator=collator, callbacks=callbacks).train()


def fine_tune(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """Trainer with `group_by_length` on the texts of the benchmark `fine_tuning`."""
    import pyarrow.parquet as pq
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    table = pq.read_table(folder / "short.parquet")
    names = sorted(set(table["label"].to_pylist()))
    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    tokens = tokenizer(table["text"].to_pylist(), truncation=True, max_length=config.max_length)["input_ids"]
    labels = [names.index(label) for label in table["label"].to_pylist()]
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "encoder", dtype=torch.float32)
    run_grouped(benchmark, config, folder, toy, model, rows, DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8))


def tag(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """Trainer with `group_by_length` on the windows of the benchmark `tagging`."""
    from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

    from recipes import token_classification

    train, *_, tokenizer = token_classification.load_data(config)
    rows = tags_and_pairs.rows_of_words(train)
    model = AutoModelForTokenClassification.from_pretrained(folder / "encoder", dtype=torch.float32)
    collator = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)
    run_grouped(benchmark, config, folder, toy, model, rows, collator)


def run_grouped(
    benchmark: Benchmark, config: Any, folder: Path, toy: bool, model: Any, rows: list[dict[str, Any]], collator: Any
) -> None:
    """Trainer with `group_by_length` on tokenized texts."""
    (folder / "facts.json").write_text(json.dumps({"operations": 0.0, "samples": len(rows)}))
    more = {"train_sampling_strategy": "group_by_length", "learning_rate": config.learning_rate}
    settings = arguments(benchmark, config, folder, toy, dataloader_num_workers=0 if toy else 4, **more)
    rates = Rates(settings.device, folder, toy)
    rates.watch(model)
    run_trainer(model, settings, rows, collator, rates)


def embed(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """The trainer of sentence-transformers with the recipe's loss on the pairs of the benchmark `embeddings`.

    Gradients are cached, with half of a step in memory at a time. On a GPU with flash_attn the texts are not padded:
    with this attention sentence-transformers unpads by itself.
    """
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    more = {"learning_rate": config.learning_rate, "dataloader_drop_last": True}
    settings, size = arguments(benchmark, config, folder, toy, TrainingArguments, **more), config.global_batch_size
    rates = Rates(settings.device, folder, toy, (size, 0))
    unpads = settings.device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = {"attn_implementation": "flash_attention_2"} if unpads else {}
    model = SentenceTransformer(str(folder / "encoder"), device=settings.device.type, model_kwargs=attention)
    model.max_seq_length = max(config.max_length)
    cached = {"mini_batch_size": size // 2, "gather_across_devices": True}
    loss = CachedMultipleNegativesRankingLoss(model, scale=1 / config.temperature, **cached)
    pairs = Dataset.from_parquet(str(folder / "encoder/train.parquet")).select_columns(["anchor", "positive"])
    (folder / "facts.json").write_text(json.dumps({"operations": 0.0, "samples": len(pairs)}))
    callbacks = [end_of_update(rates.end_update)]
    SentenceTransformerTrainer(model=model, args=settings, train_dataset=pairs, loss=loss, callbacks=callbacks).train()


def documents_and_model(benchmark: Benchmark, config: Any, folder: Path) -> tuple[list[dict[str, Any]], Any, Any]:
    """Random documents, as many as the run needs, the collator that masks them, and a new model of the recipe's sizes.

    The documents are those of the recipe's benchmark: a few, over and over.
    """
    from transformers import DataCollatorForLanguageModeling

    tokenizer, size = word_tokenizer(config.vocab_size), config.global_batch_size
    rows = random_rows(4 * size, config.max_length, config.vocab_size).tolist()
    documents = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in rows]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=config.mlm_probability, pad_to_multiple_of=8)
    torch.manual_seed(config.seed)
    model = new_encoder("AutoModelForMaskedLM", config, tokenizer, vocab_multiple=64)
    (folder / "facts.json").write_text(json.dumps({"operations": 0.0, "samples": len(rows)}))
    return (documents * (1 + benchmark.steps // 4))[: (1 + benchmark.steps) * size], collator, model


def pretrain(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """Trainer with DataCollatorForLanguageModeling."""
    data, collator, model = documents_and_model(benchmark, config, folder)
    workers = {} if toy else {"dataloader_num_workers": 8, "dataloader_persistent_workers": True}
    more = workers | {"torch_compile": config.torch_compile, "learning_rate": 5e-4}
    settings = arguments(benchmark, config, folder, toy, **more)
    update = (config.global_batch_size, config.global_batch_size * config.max_length)
    rates = Rates(settings.device, folder, toy, update)
    run_trainer(model, settings, data, collator, rates)


def train_bare(benchmark: Benchmark, config: Any, folder: Path, toy: bool) -> None:
    """A loop over batches that are in pinned memory before it begins: autocast, fused AdamW, gradients clipped."""
    data, collator, model = documents_and_model(benchmark, config, folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = config.global_batch_size
    batches = [dict(collator(data[k * size : (k + 1) * size])) for k in range(1 if toy else 4)]
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
    model.to(device).train()
    called = torch.compile(model) if config.torch_compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    rates = Rates(device, folder, toy, (size, size * config.max_length))
    for step in range(4 if toy else benchmark.steps):
        batch = batches[step % len(batches)]
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.end_update()
