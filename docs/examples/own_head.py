"""Classify texts with a head of one's own on a pretrained encoder; head and encoder have their own optimizers."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.datasets.labels import Labels, load_labeled
from shared.encoders.packing import pad_rows
from shared.encoders.text_models import adapt_to_device
from shared.losses.losses import Scale
from shared.models.optimizers import ChainedOptimizers
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_schedule, set_learning_rate, step_if_finite
from shared.options.text_options import TextOptions
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout
from shared.plan.loading import Loader, feed
from shared.pretrained.from_pretrained import load_pretrained
from shared.pretrained.tokenizers import load_tokenizer
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.tokenized import TokenizedText, check_max_length, tokenize


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Text classification with a head of one's own."""

    model_name_or_path: str | None = "bert-base-uncased"
    """Pretrained encoder on the Hub or in a local folder."""
    text_column_names: tuple[str, ...] = ("text",)
    """Column of the texts."""
    label_column_name: tuple[str, ...] = ("label",)
    """Column of the labels."""
    learning_rate: float | None = 5e-5
    """Peak learning rate of the encoder; that of the head is ten times as large."""

    label_delimiter: ClassVar = None  # each text has one label
    problem_type: ClassVar = "single_label_classification"


class Classifier(nn.Module):
    """An encoder, and a linear layer on the maximum of the hidden states of each text."""

    def __init__(self, encoder: nn.Module, width: int, labels: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, labels)

    def forward(self, attention_mask: Tensor, **batch: Tensor) -> Tensor:
        """Logits [texts, labels]."""
        hidden = self.encoder(attention_mask=attention_mask, **batch).last_hidden_state
        return self.head(hidden.masked_fill(attention_mask[..., None] == 0, -torch.inf).amax(1))


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        train, validation, labels, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        best_by = evaluation.best_by(config, ("accuracy",))
        model = build_model(config, labels, tokenizer)
        model.encoder = adapt_to_device(accelerator, config, model.encoder)  # fast attention, checked on its outputs
        collate, _ = pad_rows(model, train, tokenizer, config)
        plan = Plan.of_run(config, accelerator, lengths=train.lengths, padded=collate.padded_lengths)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        of_batch = partial(predict_batch, Scale(labels))

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Tensor]) -> Tensor:
            return of_batch(model, micro_batch, batch)[1].sum() / micro_batch.normalizer

        def evaluate() -> dict[str, float]:
            rows = plan.evaluation(validation.lengths, collate.padded_lengths)
            batches = feed(rows, validation, collate, accelerator.device)
            if (found := evaluation.collect(accelerator, model, batches, of_batch, (len(validation),))) is None:
                return {}
            correct = found[0] == validation.targets
            return {"eval_loss": float(found[1].mean()), "eval_accuracy": float(correct.mean())}

        model, optimizer, parameters = run.prepare(model, make_optimizers, loader, compute_loss)
        run.start(evaluate, best_by, lengths=train.lengths, card={"data": f"{len(train)} texts to train on, {labels}"})
        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for micro_batch, batch in loader.micro_batches(step):
                seed_dropout(accelerator.device, config.seed, step, micro_batch.index)
                with nullcontext() if micro_batch.last else accelerator.no_sync(model):
                    loss = compute_loss(micro_batch, batch)
                    gradients.backward(accelerator, loss)
                run.count(micro_batch, loss)
            grad_norm = gradients.clip(accelerator, parameters, config.max_grad_norm)
            skipped = step_if_finite(accelerator, optimizer, grad_norm)
            gradients.set_to_none(parameters)
            run.end_step(skipped, grad_norm, schedule(step))
            run.evaluate_if_due()
            run.save_if_due()
        return run.finish(model, tokenizer)


def predict_batch(_: Scale, model: Any, __: MicroBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions [texts], losses [texts] and logits [texts, labels], also of `python -m shared.predict`."""
    targets = batch.pop("labels")
    logits = model(**batch)
    return logits.argmax(1), F.cross_entropy(logits, targets, reduction="none"), logits


def make_optimizers(model: Any, config: Config) -> ChainedOptimizers:
    """AdamW for the encoder, whose unused pooler is frozen, and SGD for the head, with another learning rate."""
    encoder = [p for p in model.encoder.parameters() if p.requires_grad]
    head = {"params": [*model.head.parameters()], "lr_scale": 10.0}
    adamw = torch.optim.AdamW(encoder, lr=1e-5, fused=True)
    return ChainedOptimizers([adamw, torch.optim.SGD([head], lr=1e-5, momentum=0.9)])


def build_model(config: Config, labels: Labels, _: Any) -> Any:
    """The pretrained encoder with a new head, also for `python -m shared.predict`."""
    torch.manual_seed(config.seed)
    encoder = load_pretrained("AutoModel", config.model_name_or_path)
    check_max_length(config.max_length, encoder.config)
    return Classifier(encoder, encoder.config.hidden_size, labels.num_labels)


def load_data(config: Config) -> tuple[TokenizedText, TokenizedText, Labels, Any]:
    """Training and validation texts with the ids of their labels, the labels, and the tokenizer."""
    *tables, labels = load_labeled(config)
    assert config.model_name_or_path
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, validation = (encode(config, table, labels, tokenizer) for table in tables)
    return train, validation, labels, tokenizer


def encode(config: Config, table: Any, labels: Labels, tokenizer: Any) -> TokenizedText:
    """The texts of a table with the ids of their labels, also of the file of `python -m shared.predict`."""
    texts = tokenize(table, config.text_column_names, tokenizer, config.max_length)
    return texts.with_targets(labels.encode(table))


if __name__ == "__main__":
    run_command(main, Config)
