"""The loops that users of the recipes would write without them; peers.py starts this script.

    python benchmarks/harness/peer_loops.py JOB.json

A job names the loop, the kind of work and its settings; its figures go into the file `result`. The peers read texts
with pyarrow and transformers alone. Windows of tagged words are those of the recipe.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
import torch

from benchmarks.harness.launching import flag_words

IGNORED = -100  # the label of a token without a loss
Rows = list[dict[str, Any]]


@dataclass
class Material:
    """What a loop trains: the model, rows for training and validation, a collate function, and the score.

    `score` takes logits and labels of all validation rows, as numpy arrays. None: the score is the mean loss.
    """

    model: Any
    train: Rows
    validation: Rows
    collate: Callable[[Rows], Any]
    score: Callable[[Any, Any], float] | None


def tables(job: SimpleNamespace) -> tuple[Any, Any]:
    """The training and the validation table."""
    import pyarrow.parquet as pq

    return pq.read_table(job.train_file), pq.read_table(job.validation_file)


def accuracy(logits: Any, labels: Any) -> float:
    """The share of right classes, among the labels that count."""
    counts = labels != IGNORED
    return float((logits.argmax(-1) == labels)[counts].mean())


def pearson(logits: Any, labels: Any) -> float:
    """The correlation of predictions [rows, 1] and numbers [rows]."""
    return float(np.corrcoef(logits[:, 0], labels)[0, 1])


def sentences(job: SimpleNamespace) -> Material:
    """Texts with classes, or with numbers in regression."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    tokenizer, both = AutoTokenizer.from_pretrained(job.model), tables(job)
    regression = job.work == "regression"
    names = [None] if regression else sorted(both[0]["label"].unique().to_pylist())
    model = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=len(names))

    def rows(table: Any) -> Rows:
        tokens = tokenizer(table["text"].to_pylist(), truncation=True, max_length=job.max_length)["input_ids"]
        labels = [label if regression else names.index(label) for label in table["label"].to_pylist()]
        return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]

    score = pearson if regression else accuracy
    train, validation = map(rows, both)
    return Material(model, train, validation, DataCollatorWithPadding(tokenizer), score)


def masked_texts(job: SimpleNamespace) -> Material:
    """Texts of which some tokens are masked."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=job.mlm_probability)

    def rows(table: Any) -> Rows:
        tokens = tokenizer(table["text"].to_pylist(), truncation=True, max_length=job.max_length)["input_ids"]
        return [{"input_ids": ids} for ids in tokens]

    train, validation = map(rows, tables(job))
    return Material(AutoModelForMaskedLM.from_pretrained(job.model), train, validation, collate, None)


def tagged_words(job: SimpleNamespace) -> Material:
    """The recipe's windows of words with tags; a label at the first token of each word, in one of its windows."""
    from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

    from benchmarks.harness.tags_and_pairs import rows_of_words
    from recipes import token_classification as recipe
    from shared.config import options

    flags = {"model_name_or_path": job.model, "train_file": job.train_file, "validation_file": job.validation_file}
    words = flag_words(flags | {"max_length": job.max_length, "output_dir": job.output_dir})
    *both, tags, tokenizer = recipe.load_data(options.parse(recipe.Config, words))
    model = AutoModelForTokenClassification.from_pretrained(job.model, num_labels=len(tags.names))
    train, validation = map(rows_of_words, both)
    return Material(model, train, validation, DataCollatorForTokenClassification(tokenizer), accuracy)


MATERIALS: dict[str, Callable[[SimpleNamespace], Material]] = {
    "classification": sentences,
    "regression": sentences,
    "mlm": masked_texts,
    "tagging": tagged_words,
}


class Clock:
    """Counts real tokens, and notes the time of each update."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self.marks: list[tuple[float, int]] = []
        model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, model: Any, _: Any, batch: dict[str, Any]) -> None:
        if model.training:
            self.count += int(batch["attention_mask"].sum())

    def end_update(self) -> None:
        """Note the time and the count; call it after each update."""
        self.marks.append((time.perf_counter(), self.count))

    def rate(self) -> float:
        """Tokens per second, from the end of the first update to that of the last."""
        (started, before), (ended, after) = self.marks[0], self.marks[-1]
        return (after - before) / (ended - started)


def trainer_settings(job: SimpleNamespace, **more: Any) -> dict[str, Any]:
    """The arguments that every trainer gets."""
    settings = {
        "output_dir": job.output_dir,
        "num_train_epochs": job.epochs,
        "per_device_train_batch_size": job.global_batch_size,
        "learning_rate": job.learning_rate,
        "weight_decay": job.weight_decay,
        "lr_scheduler_type": "linear",
        "warmup_steps": job.warmup_ratio,  # below 1 it is a share of all steps
        "bf16": job.bf16,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }
    return settings | more


def end_of_update(call: Callable[[], None]) -> Any:
    """A TrainerCallback that calls `call` after each update."""
    from transformers import TrainerCallback

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            call()

    return EndOfUpdate()


def trainer(job: SimpleNamespace, strategy: str = "random") -> dict[str, float]:
    """transformers' Trainer with one of its sampling strategies."""
    from transformers import Trainer, TrainingArguments

    made = MATERIALS[job.work](job)
    clock, score = Clock(made.model), made.score
    found = Trainer(
        model=made.model,
        args=TrainingArguments(**trainer_settings(job, train_sampling_strategy=strategy)),
        train_dataset=made.train,
        eval_dataset=made.validation,
        data_collator=made.collate,
        compute_metrics=score and (lambda found: {"score": score(found.predictions, found.label_ids)}),
        callbacks=[end_of_update(clock.end_update)],
    )
    found.train()
    values = found.evaluate()
    found.save_model()
    return {"rate": clock.rate(), "score": values["eval_score" if score else "eval_loss"]}


def trainer_grouped(job: SimpleNamespace) -> dict[str, float]:
    """Trainer with samples grouped by length."""
    return trainer(job, "group_by_length")


def accelerate(job: SimpleNamespace) -> dict[str, float]:
    """The loop of Accelerate's documentation: random batches, padded to their longest row."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

    set_seed(job.seed)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.bf16 else "no")
    made = MATERIALS[job.work](job)
    clock, size = Clock(made.model), job.global_batch_size
    loader: Any = DataLoader(made.train, batch_size=size, shuffle=True, collate_fn=made.collate)
    validation: Any = DataLoader(made.validation, batch_size=size, collate_fn=made.collate)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay)
    model, optimizer, loader, validation = accelerator.prepare(made.model, optimizer, loader, validation)
    steps = job.epochs * len(loader)
    schedule = get_linear_schedule_with_warmup(optimizer, int(job.warmup_ratio * steps), steps)
    model.train()
    for _ in range(job.epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            clock.end_update()
    model.eval()
    found, losses = [], []
    with torch.inference_mode():
        for batch in validation:
            output = model(**batch)
            losses.append(output.loss.repeat(len(batch["labels"])))
            if made.score:
                found.append((output.logits.float(), batch["labels"]))
    accelerator.unwrap_model(model).save_pretrained(job.output_dir)
    if made.score is None:
        return {"rate": clock.rate(), "score": float(torch.cat(losses).mean())}
    if found[0][1].ndim == 2:  # rows of tokens
        found = [(logits.flatten(0, 1), labels.flatten()) for logits, labels in found]
    logits, labels = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return {"rate": clock.rate(), "score": made.score(logits, labels)}


def sentence_transformers(job: SimpleNamespace, cached: bool = False) -> dict[str, float]:
    """The trainer of sentence-transformers with its ranking loss; the score is nDCG@10 on the validation pairs."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

    train, validation = (table.select(["anchor", "positive"]) for table in tables(job))
    model = SentenceTransformer(job.model, device="cpu")
    model.max_seq_length = job.max_length
    kind = losses.CachedMultipleNegativesRankingLoss if cached else losses.MultipleNegativesRankingLoss
    marks: list[float] = []
    SentenceTransformerTrainer(
        model=model,
        args=TrainingArguments(**trainer_settings(job)),
        train_dataset=Dataset(train),
        loss=kind(model, scale=1 / job.temperature),
        callbacks=[end_of_update(lambda: marks.append(time.perf_counter()))],
    ).train()
    anchors, positives = (dict(enumerate(dict.fromkeys(column.to_pylist()))) for column in validation.columns)
    number_of = {text: str(number) for number, text in positives.items()}
    relevant: dict[str, set[str]] = {str(number): set() for number in anchors}
    query_of = {text: str(number) for number, text in anchors.items()}
    for pair in validation.to_pylist():
        relevant[query_of[pair["anchor"]]].add(number_of[pair["positive"]])
    named = ({str(number): text for number, text in texts.items()} for texts in (anchors, positives))
    scores = InformationRetrievalEvaluator(*named, relevant, name="valid", write_csv=False)(model)
    model.save_pretrained(job.output_dir)
    rate = job.global_batch_size * (len(marks) - 1) / (marks[-1] - marks[0])
    return {"rate": rate, "score": float(scores["valid_cosine_ndcg@10"])}


def sentence_transformers_cached(job: SimpleNamespace) -> dict[str, float]:
    """The same with the loss that keeps memory small by embedding each text twice."""
    return sentence_transformers(job, cached=True)


TRAINERS = {loop.__name__: loop for loop in (trainer_grouped, trainer, accelerate)}
EMBEDDERS = {loop.__name__: loop for loop in (sentence_transformers, sentence_transformers_cached)}


def main() -> None:
    job = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.result).write_text(json.dumps((TRAINERS | EMBEDDERS)[job.loop](job)))


if __name__ == "__main__":
    main()
