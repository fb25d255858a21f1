"""Train a classifier of texts on their labels and on the probabilities of a second model, a frozen teacher."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.datasets.labels import Labels, load_labeled
from shared.encoders.packing import pad_rows
from shared.encoders.text_models import adapt_to_device
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, make_schedule, set_learning_rate, step_if_finite
from shared.options.text_options import TextOptions
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout
from shared.plan.loading import Loader, feed
from shared.pretrained.from_pretrained import load_pretrained
from shared.pretrained.tokenizers import load_tokenizer
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.tokenized import TokenizedText, check_max_length, tokenize

AUTO_CLASS = "AutoModelForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Text classification with a teacher."""

    model_name_or_path: str | None = "distilbert-base-uncased"
    """Pretrained model that is trained, on the Hub or in a local folder."""
    teacher_name_or_path: str = "bert-base-uncased"
    """Classifier with the same tokenizer and the same labels, on the Hub or in a local folder."""
    text_column_names: tuple[str, ...] = ("text",)
    """Column of the texts."""
    label_column_name: tuple[str, ...] = ("label",)
    """Column of the labels."""
    learning_rate: float | None = 5e-5
    """Peak learning rate."""

    label_delimiter: ClassVar = None  # each text has one label
    problem_type: ClassVar = "single_label_classification"


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        train, validation, labels, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        best_by = evaluation.best_by(config, ("accuracy",))
        torch.manual_seed(config.seed)
        student = load_pretrained(AUTO_CLASS, config.model_name_or_path, num_labels=labels.num_labels)
        check_max_length(config.max_length, student.config)
        model: Any = adapt_to_device(accelerator, config, student)
        flag = "--teacher_name_or_path"  # named by errors
        teacher = load_pretrained(AUTO_CLASS, config.teacher_name_or_path, flag=flag).to(accelerator.device)
        teacher.eval().requires_grad_(False)
        collate, _ = pad_rows(model, train, tokenizer, config)
        plan = Plan.of_run(config, accelerator, lengths=train.lengths, padded=collate.padded_lengths)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)
        parts: dict[str, Tensor] = {}  # of the loss of the last micro-batch

        def losses_of(model: Any, _: MicroBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            targets = batch.pop("labels")
            logits = model(**batch).logits
            return logits.argmax(1), F.cross_entropy(logits, targets, reduction="none")

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Tensor]) -> Tensor:
            targets = batch.pop("labels")
            logits = model(**batch).logits
            with torch.no_grad(), accelerator.autocast():
                wanted = teacher(**batch).logits.float().softmax(1)
            parts["labels"] = F.cross_entropy(logits, targets, reduction="sum") / micro_batch.normalizer
            parts["teacher"] = F.cross_entropy(logits, wanted, reduction="sum") / micro_batch.normalizer
            return parts["labels"] + parts["teacher"]

        def evaluate() -> dict[str, float]:
            rows = plan.evaluation(validation.lengths, collate.padded_lengths)
            batches = feed(rows, validation, collate, accelerator.device)
            if (found := evaluation.collect(accelerator, model, batches, losses_of, (len(validation),))) is None:
                return {}
            correct = found[0] == validation.targets
            return {"eval_loss": float(found[1].mean()), "eval_accuracy": float(correct.mean())}

        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss)
        run.start(evaluate, best_by, lengths=train.lengths, card={"data": f"{len(train)} texts to train on, {labels}"})
        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for micro_batch, batch in loader.micro_batches(step):
                seed_dropout(accelerator.device, config.seed, step, micro_batch.index)
                with nullcontext() if micro_batch.last else accelerator.no_sync(model):
                    loss = compute_loss(micro_batch, batch)
                    gradients.backward(accelerator, loss)
                run.count(micro_batch, loss, parts)
            grad_norm = gradients.clip(accelerator, parameters, config.max_grad_norm)
            skipped = step_if_finite(accelerator, optimizer, grad_norm)
            gradients.set_to_none(parameters)
            run.end_step(skipped, grad_norm, schedule(step))
            run.evaluate_if_due()
            run.save_if_due()
        return run.finish(model, tokenizer)


def load_data(config: Config) -> tuple[TokenizedText, TokenizedText, Labels, Any]:
    """Training and validation texts with the ids of their labels, the labels, and the tokenizer."""
    *tables, labels = load_labeled(config)
    assert config.model_name_or_path
    tokenizer = load_tokenizer(config.model_name_or_path)
    texts = [tokenize(table, config.text_column_names, tokenizer, config.max_length) for table in tables]
    train, validation = (text.with_targets(labels.encode(table)) for text, table in zip(texts, tables, strict=True))
    return train, validation, labels, tokenizer


if __name__ == "__main__":
    run_command(main, Config)
