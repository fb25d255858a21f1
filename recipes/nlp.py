"""Train a text encoder for classification or regression of sentences or sentence pairs, on any number of processes.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/nlp.py

Without arguments it learns to tell from which library a docstring is. With your own data and a pretrained encoder:

    ... recipes/nlp.py --train_file train.csv --model_name_or_path answerdotai/ModernBERT-base --learning_rate 5e-5

Expected: 0.93 accuracy after 2 epochs, in 50 to 82 s on 2 CPU cores. TF-IDF with logistic regression reaches 0.933.
To copy: python -m shared.vendor recipes/nlp.py FOLDER
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.cache.prepared import each_share
from shared.datasets.labels import Labels, load_labeled
from shared.encoders.packing import pack_or_pad, unpack_before_head
from shared.encoders.text_models import adapt_to_device, new_encoder
from shared.losses.losses import Scale, shape_of_run
from shared.metrics.task_metrics import Scorer, resolve_metrics
from shared.models.optimizers import make_optimizer
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_schedule, set_learning_rate, step_if_finite
from shared.options.text_options import TextLossOptions
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout
from shared.plan.loading import Loader, feed
from shared.pretrained.from_pretrained import checkpoint_activations, head_for, load_classifier, pooling_of_head
from shared.pretrained.tokenizers import load_tokenizer, share_padding
from shared.report.mistakes import Mistakes, as_text
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.tokenized import TokenizedText, check_max_length, check_vocabulary, cut_off, tokenize, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class Config(TextLossOptions):
    """Text classification and regression."""

    text_column_names: tuple[str, ...] = ("text",)
    """Column of the sentences, or the two columns of sentence pairs."""
    label_column_name: tuple[str, ...] = ("label",)
    """Column of labels: strings, integers, floats (regression) or lists. Or several 0/1 columns, one for each label."""
    label_delimiter: str | None = None
    """Separator between several labels in the label column, such as a comma."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Kind of task. None: determined by the type of the label column."""
    max_length: int = 96
    """Maximum number of tokens of a sentence or pair; further ones are cut off."""
    packing: bool = True
    """Concatenate the texts of a micro-batch without padding and without attention between them. Off: one per row."""
    pooling: Literal["auto", "cls", "mean"] = "auto"
    """What the head reads of a text: its first token (cls) or the mean over its tokens. auto: the model's own."""
    num_train_epochs: int = 2
    """Passes over the training data."""
    output_dir: str = "out/nlp"
    """Folder of the run: report.html, config.yaml, metrics.jsonl, checkpoints/, model/."""
    learning_rate: float | None = None
    """Peak learning rate. None: 1e-3 for a new encoder, 5e-5 for a pretrained one, 5e-4 for adapters (--lora_rank)."""

    LEARNING_RATES: ClassVar = (1e-3, 5e-5)
    MAX_TOKENS: ClassVar = (1024, 16_384)


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        train, validation, labels, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        metrics = resolve_metrics(config, labels.kind, labels.names, validation.targets)
        best_by = evaluation.best_by(config, metrics.names, metrics.undefined)
        model = adapt_to_device(accelerator, config, build_model(config, labels, tokenizer))
        scale = Scale.of_run(labels, train.targets, model)
        collate, rows = pack_or_pad(model, train, tokenizer, accelerator, config, unpack_before_head)
        shape = shape_of_run(config, labels.kind, labels.names, train.targets, accelerator.device)
        sizes = {"lengths": train.lengths, "padded": collate.padded_lengths}
        plan = Plan.of_run(config, accelerator, **sizes, weights=shape.sample_weights, packed=collate.packed)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Tensor]) -> Tensor:
            """The contribution of a micro-batch to the mean loss of its global batch."""
            targets = scale.standardize(batch.pop("labels"))
            losses = item_losses(labels.kind, model(**batch).logits, targets, **shape.cross_entropy)
            return losses.sum() / micro_batch.normalizer

        wrong = Mistakes(labels.names, lambda row: as_text(tokenizer, validation[row][0]))
        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss, scale, wrong)

        cut = cut_off(train.lengths, config.max_length)
        data = f"{len(train):,} training texts{cut} and {len(validation):,} validation texts, {labels}{scale}; {rows}"
        score = partial(evaluate, accelerator, model, plan, validation, collate, scale, metrics, wrong)
        run.start(score, best_by, lengths=train.lengths, card={"data": data} | metrics.notes | shape.notes)
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


def evaluate(
    accelerator: Any, model: Any, plan: Plan, data: TokenizedText, collate: Any, scale: Scale, metrics: Any, wrong: Any
) -> dict[str, float]:
    """Loss and metrics on `data`, in which each sample counts once; {} if a signal interrupted the evaluation."""
    batches = feed(plan.evaluation(data.lengths, collate.padded_lengths), data, collate, accelerator.device)
    scorer, shape = Scorer(metrics, partial(predict_batch, scale)), data.targets.shape
    if (found := evaluation.collect(accelerator, model, batches, scorer, shape)) is None:
        return {}
    predictions, losses = found
    wrong.keep(predictions, losses, data.targets)
    values = scorer.compute(accelerator, predictions, data.targets)
    return {"eval_loss": float(losses.mean())} | {f"eval_{name}": value for name, value in values.items()}


def predict_batch(scale: Scale, model: Any, _: MicroBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions, losses [rows] and logits [rows, labels], of evaluations and of `python -m shared.predict`."""
    kind, targets = scale.labels.kind, batch.pop("labels")
    logits = scale.restore(model(**batch).logits)
    return predict(kind, logits), item_losses(kind, logits, targets), logits


def item_losses(kind: str, logits: Tensor, targets: Tensor, **training: Any) -> Tensor:
    """Losses [rows] of logits [rows, labels] and targets [rows] or [rows, labels]; `training` has class weights."""
    if kind == "classification":
        return F.cross_entropy(logits, targets, reduction="none", **training)
    if kind == "multi_label":
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    return F.mse_loss(logits.squeeze(1), targets, reduction="none")


def predict(kind: str, logits: Tensor) -> Tensor:
    """Predictions of logits [rows, labels]: class ids [rows], 0 or 1 per label [rows, labels], or numbers [rows]."""
    if kind == "classification":
        return logits.argmax(1)
    return (logits > 0).long() if kind == "multi_label" else logits.squeeze(1)


# To train with your own data or model, replace the functions below.


def load_data(config: Config) -> tuple[TokenizedText, TokenizedText, Labels, Any]:
    """Training and validation data, the labels, and the tokenizer."""
    *tables, labels = load_labeled(config)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        columns, kind = config.text_column_names, config.tokenizer_type
        tokenizer = train_tokenizer(tables[0], columns, kind, config.vocab_size, config.max_length)
    train, validation = each_share(lambda table: encode(config, table, labels, tokenizer), tables)
    return train, validation, labels, tokenizer


def encode(config: Config, table: Any, labels: Labels, tokenizer: Any) -> TokenizedText:
    """The texts and targets of a table, also of the file of `python -m shared.predict`."""
    texts = tokenize(table, config.text_column_names, tokenizer, config.max_length)
    return texts.with_targets(labels.encode(table))


def build_model(config: Config, labels: Labels, tokenizer: Any) -> torch.nn.Module:
    """A pretrained encoder with a head for the labels, or a new one: pre-norm, rotary positions, no dropout."""
    torch.manual_seed(config.seed)
    head = head_for(labels.names or ("score",), problem_type=labels.problem_type, **pooling_of_head(config))
    auto_class = "AutoModelForSequenceClassification"
    if config.model_name_or_path:
        model = load_classifier(auto_class, config.model_name_or_path, revision=config.revision, **head)
    else:
        model = new_encoder(auto_class, config, tokenizer, **head)
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config)
    check_max_length(config.max_length, model.config)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


if __name__ == "__main__":
    run_command(main, Config)
