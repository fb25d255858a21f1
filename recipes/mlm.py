"""Pretrain a text encoder with masked language modeling, or continue its pretraining: BERT, RoBERTa or ModernBERT.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/mlm.py

Without arguments it trains on the docstrings of Python libraries. With your own text and a full-size model:

    ... recipes/mlm.py --config recipes/configs/modernbert_base.yaml --train_file corpus.txt

Expected: accuracy 0.38 at masked tokens and loss 3.6, after one epoch of 520 steps in 5.6 minutes of CPU time.
To copy: python -m shared.vendor recipes/mlm.py FOLDER
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.config.fields import Meaning
from shared.config.options import Limits, ScheduleType, Share
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import pack_or_pad
from shared.encoders.text_models import adapt_to_device, new_encoder
from shared.models.optimizers import make_optimizer
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_schedule, set_learning_rate, step_if_finite
from shared.options.text_options import TextOptions
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout
from shared.plan.loading import Loader, feed
from shared.pretrained.from_pretrained import checkpoint_activations, load_pretrained
from shared.pretrained.tokenizers import special_tokens_around
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.corpus import load_corpus
from shared.text.masking import masking_for
from shared.text.token_files import MaskedDocuments
from shared.text.tokenized import check_max_length, check_vocabulary

EVALUATION_PROBABILITY = 0.15  # fixed, so that runs with different training masks can be compared


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Masked language modeling."""

    text_column_name: str = "text"
    """Column of the documents. In a text file, each line is a document."""
    prepared_data: Annotated[str | None, Meaning.NAMES_DATA] = None
    """Instead of --train_file: the folder that python -m shared.prepare --to has written, or its URL (s3://, https://)."""
    cache_gb: Annotated[float | None, Limits(above=0), Meaning.NOT_IN_RESULT, Meaning.MAY_DIFFER] = None
    """Size of the cache of a --prepared_data URL on this machine, in GB. None: 16."""
    max_length: int = 128
    """Maximum length of a sequence in tokens. Longer documents are cut into pieces; no token is dropped."""
    packing: bool = True
    """Concatenate documents without padding and without attention between them. Otherwise: one document per row."""
    mlm_probability: Annotated[float, Limits(above=0, below=1)] = 0.3
    """Fraction of the tokens of each document that is masked, rounded to an exact number of tokens."""
    mask_replace_prob: Share = 0.8
    """Fraction of the masked tokens that is replaced by the mask token."""
    random_replace_prob: Share = 0.1
    """Fraction of the masked tokens that is replaced by a random token; the rest is not changed."""
    whole_word_masking: bool = False
    """Mask whole words. The last one in a document may be masked in part, to keep the exact number of tokens."""
    global_batch_size: int | None = 64
    """Documents, or pieces of long ones, per optimizer step, over all processes and micro-batches."""
    num_train_epochs: int = 1
    """Passes over the training data."""
    output_dir: str = "out/mlm"
    """Folder of the run: report.html, config.yaml, metrics.jsonl, checkpoints/, model/."""
    optim: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer."""
    learning_rate: float | None = None
    """Peak learning rate. None: 2e-3, or 5e-5 if pretrained, 5e-4 for adapters. Large new models need 1e-4 to 1e-3."""
    lr_scheduler_type: ScheduleType = "warmup_stable_decay"
    """Learning rate schedule after the warm-up. A finished run can be made longer with constant and --warmup_steps."""

    LEARNING_RATES: ClassVar = (2e-3, 5e-5)
    NEEDS: ClassVar = (*TextOptions.NEEDS, ("cache_gb", "prepared_data"))
    EXCLUDES: ClassVar = (*TextOptions.EXCLUDES, *(("prepared_data", name) for name in ("train_file", "dataset_name")))


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        best_by = evaluation.best_by(config, ("accuracy", "perplexity"))
        train, validation, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        model = adapt_to_device(accelerator, config, build_model(config, tokenizer))
        collate, sequences = pack_or_pad(model, train, tokenizer, accelerator, config)
        sizes = {"lengths": train.lengths, "longest": train.longest, "padded": collate.padded_lengths}
        plan = Plan.of_run(config, accelerator, **sizes, weights=train.masked, packed=collate.packed)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
            """The contribution of a micro-batch to the mean loss of its global batch."""
            targets = batch.pop("labels")
            logits = model(**batch).logits  # of the masked tokens only: see `predict_only_masked`
            losses = F.cross_entropy(logits, targets, reduction="none")
            return losses.sum() / micro_batch.normalizer

        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss)

        data = f"{len(train):,} training and {len(validation):,} validation pieces, {train.num_tokens:,} tokens"
        score = partial(evaluate, accelerator, config, model, plan, validation, collate)
        card = {"data": data, "sequences": sequences}
        run.start(score, best_by, lengths=train.lengths, card=card)
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
    accelerator: Any, config: Config, model: Any, plan: Plan, data: MaskedDocuments, collate: Any
) -> dict[str, float]:
    """Loss, accuracy and pseudo-perplexity at the masked tokens of `data`; {} if a signal interrupted it."""

    def predict(model: Any, micro_batch: MicroBatch, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The number of correct predictions and the sum of the losses of each piece."""
        targets = batch.pop("labels")
        logits = model(**batch).logits
        losses, hits = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(1) == targets
        counts = torch.from_numpy(data.masked[micro_batch.samples]).to(accelerator.device)  # of each piece
        return tuple(torch.segment_reduce(each.float(), "sum", lengths=counts) for each in (hits, losses))

    batches = feed(plan.evaluation(data.lengths, collate.padded_lengths), data, collate, accelerator.device)
    if (found := evaluation.collect(accelerator, model, batches, predict, (len(data),))) is None:
        return {}
    hits, losses = found
    loss, accuracy = (float(each.sum() / data.masked.sum()) for each in (losses, hits))
    return {"eval_loss": loss, "eval_accuracy": accuracy, "eval_perplexity": float(np.exp(loss))}


# To train with your own data or model, replace the functions below.


def load_data(config: Config) -> tuple[MaskedDocuments, MaskedDocuments, Any]:
    """Training and validation data, and the tokenizer."""
    train, held_out, tokenizer = load_corpus(config)
    shares = (config.mask_replace_prob, config.random_replace_prob)
    masking = masking_for(tokenizer, config.mlm_probability, *shares, config.whole_word_masking)
    always_the_same = masking_for(tokenizer, EVALUATION_PROBABILITY)
    around = special_tokens_around(tokenizer)
    data = MaskedDocuments(*train, config.max_length, around, masking, config.seed)
    return data, MaskedDocuments(*held_out, config.max_length, around, always_the_same, 0), tokenizer


def build_model(config: Config, tokenizer: Any) -> torch.nn.Module:
    """A pretrained model with its head, or a new one without dropout."""
    torch.manual_seed(config.seed)
    if config.model_name_or_path:
        model = load_pretrained("AutoModelForMaskedLM", config.model_name_or_path, config.revision)
    else:
        model = new_encoder("AutoModelForMaskedLM", config, tokenizer, vocab_multiple=64)
    check_vocabulary(tokenizer, model.config)
    check_max_length(config.max_length, model.config)
    predict_only_masked(model, config.packing)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


if __name__ == "__main__":
    run_command(main, Config)
