"""The training loops that recipes/nlp.py is compared with; each measures itself.

nlp_peers.py starts this script under torchrun, once per contestant and round, and reads the JSON that rank 0 writes.
"""

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.harness.launching import run_job
from shared.config.data_options import DataOptions
from shared.datasets.labels import Labels
from shared.datasets.tables import load_tables
from shared.pretrained.from_pretrained import load_pretrained
from shared.text.tokenized import TokenizedText, tokenize

STRATEGIES = ("group_by_length", "batch_rebalance")  # sampling strategies of the tuned Trainer


def read_data(job: SimpleNamespace) -> tuple[TokenizedText, TokenizedText, Labels, Any]:
    """Training texts, validation texts, labels and tokenizer, read as the recipe reads them."""
    files = DataOptions(train_file=job.train_file, validation_file=job.validation_file)
    tables = load_tables(files, ["text"], ["label"])
    labels = Labels.from_table(tables[0], "label", None)
    tokenizer = load_pretrained("AutoTokenizer", job.encoder)
    texts = [tokenize(t, ("text",), tokenizer, job.max_length).with_targets(labels.encode(t)) for t in tables]
    return texts[0], texts[1], labels, tokenizer


class Counter:
    """Counts the real tokens, all positions and the samples that a model gets, and notes the time of each update."""

    def __init__(self, model: nn.Module) -> None:
        self.counts = np.zeros(3)
        self.marks: list[np.ndarray] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        self.counts += (int(mask.sum()), mask.numel(), len(mask))

    def end_update(self) -> None:
        """Note the time and the counts; call it after each update."""
        self.marks.append(np.array([time.perf_counter(), *self.counts]))

    def result(self, warmup: int) -> dict[str, float]:
        """Rates over all processes, from the end of update `warmup` to the end of the last one."""
        seconds, *counts = self.marks[-1] - self.marks[warmup - 1]
        totals = torch.tensor(counts, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(totals)
        real, padded, samples = totals.tolist()
        return {
            "tokens_per_second": real / seconds,
            "samples_per_second": samples / seconds,
            "padding_share": 1 - real / padded,
            "tokens_per_sample": real / samples,
            "seconds": seconds,
        }


class Dicts(torch.utils.data.Dataset):
    """The tokens as lists in dicts, which a data loader with `pad` and transformers' Trainer expect."""

    def __init__(self, texts: TokenizedText) -> None:
        targets = texts.targets
        assert targets is not None
        self.rows = [{"input_ids": texts[i][0].tolist(), "labels": int(targets[i])} for i in range(len(texts))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows padded to the longest of them: tensors [rows, tokens], and labels [rows]."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.int64) for row in ids]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence(mask, batch_first=True),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def load_model(job: SimpleNamespace) -> nn.Module:
    """The classifier with the encoder, in float32."""
    return load_pretrained("AutoModelForSequenceClassification", job.encoder)


def order_of(job: SimpleNamespace, train: TokenizedText) -> list[int]:
    """The samples in the order of training: random; if tuned, grouped by length with transformers' sampler."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(job.seed)
    if not job.tuned:
        return torch.randperm(len(train), generator=generator).tolist()
    size = job.rows * job.accumulation * int(os.environ["WORLD_SIZE"])
    grouped = LengthGroupedSampler(size, lengths=train.lengths.tolist(), generator=generator)
    return typical_updates(list(grouped), train.lengths, size, job.steps, job.warmup, job.seed)


def share_of(job: SimpleNamespace, order: list[int]) -> list[int]:
    """The samples of this process: of N processes, every N-th batch."""
    batches = np.array(order[: len(order) // job.rows * job.rows]).reshape(-1, job.rows)
    return batches[dist.get_rank() :: dist.get_world_size()].flatten().tolist()


def loader_of(job: SimpleNamespace, train: TokenizedText, order: list[int]) -> Any:
    """A DataLoader over `order`; only tuned contestants have workers."""
    workers = job.workers if job.tuned else 0
    return torch.utils.data.DataLoader(
        Dicts(train), batch_size=job.rows, sampler=order, collate_fn=pad, drop_last=True, num_workers=workers
    )


def bare(job: SimpleNamespace) -> dict[str, float]:
    """Plain PyTorch: DDP with its defaults, fused AdamW."""
    dist.init_process_group("gloo")
    train, _, _, _ = read_data(job)
    loader = loader_of(job, train, share_of(job, order_of(job, train)))
    inner = load_model(job).train()
    counter = Counter(inner)
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = iter(loader)
    for _ in range(job.steps):
        for left in reversed(range(job.accumulation)):
            with model.no_sync() if left else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
                    loss = model(**next(batches)).loss / job.accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counter.end_update()
    return counter.result(job.warmup)


def accelerate(job: SimpleNamespace) -> dict[str, float]:
    """The loop of Accelerate's documentation, with its `accumulate`."""
    from accelerate import Accelerator

    precision = "bf16" if job.bf16 else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=job.accumulation)
    train, _, _, _ = read_data(job)
    inner = load_model(job).train()
    counter = Counter(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=job.tuned or None)
    loader = loader_of(job, train, order_of(job, train))
    model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            counter.end_update()
        if len(counter.marks) == job.steps:
            break
    return counter.result(job.warmup)


def fabric(job: SimpleNamespace) -> dict[str, float]:
    """The loop of Lightning Fabric's documentation, with its `no_backward_sync`."""
    from lightning_fabric import Fabric

    precision: Any = "bf16-mixed" if job.bf16 else "32-true"
    world = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", precision=precision)
    fabric.launch()
    train, _, _, _ = read_data(job)
    inner = load_model(job).train()
    counter = Counter(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=job.tuned or None)
    model, optimizer = fabric.setup(inner, optimizer)
    loader = loader_of(job, train, share_of(job, order_of(job, train)))
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)  # it would shuffle a grouped order
    for number, batch in enumerate(loader, start=1):
        last = number % job.accumulation == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(**batch).loss / job.accumulation)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            counter.end_update()
        if len(counter.marks) == job.steps:
            break
    return counter.result(job.warmup)


def trainer(job: SimpleNamespace) -> dict[str, float]:
    """transformers' Trainer with one of its sampling strategies; it does not save, evaluate or log."""
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    train, _, _, tokenizer = read_data(job)
    model = load_model(job)
    counter = Counter(model)

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counter.end_update()

    class FewUpdates(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            sampler = super()._get_train_sampler(train_dataset)
            if job.strategy != "group_by_length":
                return sampler
            order, size = list(sampler), job.rows * job.accumulation * dist.get_world_size()
            return typical_updates(order, train.lengths, size, job.steps, job.warmup, job.seed)

    arguments = TrainingArguments(
        output_dir=job.output_dir,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=job.accumulation,
        train_sampling_strategy=job.strategy,
        optim="adamw_torch_fused",  # its default
        learning_rate=1e-4,
        bf16=job.bf16,
        dataloader_num_workers=job.workers if job.tuned else 0,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )
    FewUpdates(
        model=model,
        args=arguments,
        train_dataset=Dicts(train),
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[EndOfUpdate()],
        processing_class=tokenizer,
    ).train()
    return counter.result(job.warmup)


def typical_updates(order: list[int], lengths: np.ndarray, size: int, steps: int, warmup: int, seed: int) -> list[int]:
    """The samples of `steps` updates that represent all updates of an epoch.

    `group_by_length` goes from the longest texts to the shortest over thousands of samples, so the first few updates
    have long texts only. This sorts all updates by length and takes some at even distances.
    """
    updates = np.array(order[: len(order) // size * size]).reshape(-1, size)
    assert len(updates) >= steps, "fewer updates in an epoch than are asked for"
    by_length = updates[np.argsort(lengths[updates].sum(1))]
    timed = steps - warmup
    picked = by_length[((np.arange(timed) + 0.5) * len(updates) / timed).astype(int)]
    warm = by_length[np.full(warmup, len(updates) // 2)]
    np.random.default_rng(seed).shuffle(picked)
    return [int(i) for i in np.concatenate([warm, picked]).flatten()]


def evaluating_trainer(job: SimpleNamespace, validation: TokenizedText, tokenizer: Any, metrics: Any) -> Any:
    """transformers' Trainer, as shipped, with its own model and the recipe's metrics."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=job.output_dir, ddp_backend="gloo", use_cpu=True, report_to="none", disable_tqdm=True
    )
    return Trainer(
        model=load_model(job),
        args=arguments,
        eval_dataset=Dicts(validation),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda found: metrics.compute(found.predictions.argmax(1), found.label_ids),
    )


def evaluation(job: SimpleNamespace) -> dict[str, Any]:
    """Measure the recipe's evaluation, Trainer's, and one in random order in batches of the training's size, in turns.

    Raises:
        AssertionError: the recipe and Trainer give different values. The scores have to be equal to the last digit,
            the loss to rounding.
    """
    from accelerate import Accelerator

    from recipes import nlp
    from shared.metrics.task_metrics import resolve_metrics
    from shared.plan.batches import Plan
    from shared.text.tokenized import Padding

    accelerator = Accelerator(cpu=True)
    train, validation, labels, tokenizer = read_data(job)
    model = accelerator.prepare(load_model(job))
    collate = Padding(tokenizer.pad_token_id, max_length=job.max_length)
    plan = Plan(
        lengths=train.lengths,
        seed=0,
        global_batch_size=job.rows * job.accumulation * accelerator.num_processes,
        max_steps=1,
        max_tokens=job.max_tokens,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
    )
    metrics = resolve_metrics(nlp.Config(), labels.kind, labels.names, validation.targets)
    dataset = Dicts(validation)
    inner = accelerator.unwrap_model(model)

    trainer = evaluating_trainer(job, validation, tokenizer, metrics)

    def ours() -> dict[str, float]:
        return nlp.evaluate(accelerator, model, plan, validation, collate, nlp.Scale(labels), metrics)

    @torch.inference_mode()
    def random_order(turn: int) -> None:
        sampler = torch.utils.data.DistributedSampler(dataset, seed=turn)
        loader = torch.utils.data.DataLoader(dataset, batch_size=job.rows, sampler=sampler, collate_fn=pad)
        inner.eval()
        right = torch.zeros(())
        for batch in loader:
            right += (inner(**batch).logits.argmax(1) == batch["labels"]).sum()
        accelerator.reduce(right)

    turns = []
    for turn in range(job.warmup + job.steps):
        seconds, values = {}, {}
        runs = {"ours": ours, "trainer": trainer.evaluate, "random_order": lambda turn=turn: random_order(turn)}
        for name in [*runs][turn % 3 :] + [*runs][: turn % 3]:
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            values[name] = runs[name]()
            accelerator.wait_for_everyone()
            seconds[name] = time.perf_counter() - started
        for name, value in values["ours"].items():
            theirs = values["trainer"][name]
            if name == "eval_loss":  # transformers 5.23 multiplies it by the number of processes, in evaluation too
                theirs /= accelerator.num_processes
            assert abs(value - theirs) < (1e-4 if name == "eval_loss" else 1e-9), (name, values)
        ratios = {
            "ratio": seconds["ours"] / seconds["random_order"],
            "of_trainer": seconds["ours"] / seconds["trainer"],
        }
        turns.append(seconds | ratios)
    return {"texts": len(validation), "turns": turns[job.warmup :]}


def measure(job: SimpleNamespace) -> dict[str, Any]:
    """The figures of the job's contestant."""
    run = {"bare": bare, "accelerate": accelerate, "fabric": fabric, "trainer": trainer, "evaluation": evaluation}
    job.tuned = job.contestant.endswith("_tuned") or job.contestant in STRATEGIES
    job.strategy = job.contestant if job.contestant in STRATEGIES else "random"
    return run["trainer" if job.contestant in STRATEGIES else job.contestant.removesuffix("_tuned")](job)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON: `contestant` and its settings; the result goes to `result`")
    run_job(parser.parse_args().job, measure)


if __name__ == "__main__":
    main()
