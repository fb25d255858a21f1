"""Train a text encoder, from scratch or onwards, to fill in hidden tokens: BERT, RoBERTa or ModernBERT.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/mlm.py

Without arguments it learns from the docstrings of installed libraries. Your own text, and a full-size model:

    ... recipes/mlm.py --config recipes/configs/modernbert_base.yaml --train_file corpus.txt

Expected: 0.38 of the hidden tokens right after 520 steps, one pass, in 5.6 minutes of CPU time; the loss falls to 3.6.
To copy: this file and the folder shared/.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.config.options import Limits, ScheduleType, Share
from shared.config.text_options import TextOptions
from shared.datasets.documents import first_texts, load_documents
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.new_encoders import new_encoder
from shared.encoders.packing import pack_or_pad
from shared.encoders.text_models import adapt_to_device
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, make_schedule, set_learning_rate, step_if_finite
from shared.plan.batches import MicroBatch, Plan
from shared.plan.loading import Loader, feed
from shared.plan.seeding import seed_dropout
from shared.pretrained.from_pretrained import checkpoint_activations, load_pretrained
from shared.pretrained.tokenizers import load_tokenizer
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.masking import masking_for
from shared.text.token_files import MaskedDocuments, special_tokens_around, tokenize_parts
from shared.text.tokenized import check_max_length, check_vocabulary, train_tokenizer

TOKENIZER_BYTES = 1 << 26  # of text that a new tokenizer is trained on, from the start of the data
EVALUATION_PROBABILITY = 0.15  # and every hidden token is the mask token: runs that train otherwise can be compared


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Masked language modeling."""

    text_column_name: str = "text"
    """The column of the documents; a text file has one on each line."""
    max_length: int = 128
    """Longest sequence in tokens. Longer documents are cut into pieces of that length; nothing is dropped."""
    packing: bool = True
    """Documents end to end, without padding and without attention to each other. Else: one document per row."""
    mlm_probability: Annotated[float, Limits(above=0, below=1)] = 0.3
    """Share of the tokens of each document that is hidden: an exact number of them."""
    mask_replace_prob: Share = 0.8
    """Share of the hidden tokens that become the mask token."""
    random_replace_prob: Share = 0.1
    """Share of the hidden tokens that become a random token; what is left stays as it is."""
    whole_word_masking: bool = False
    """Hide whole words; the last one of a document maybe in part, so that the number of tokens stays exact."""
    global_batch_size: int | None = 64
    """Pieces of documents per optimizer step, over all processes and micro-batches."""
    num_train_epochs: int = 1
    """Passes over the training data."""
    output_dir: str = "out/mlm"
    """Folder of the run: config.yaml, metrics.jsonl, curves.png, checkpoints/, model/."""
    optim: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer."""
    learning_rate: float | None = None
    """Peak learning rate. None: 2e-3, or 5e-5 for a pretrained model; 1e-4 to 1e-3 suits new ones of full size."""
    lr_scheduler_type: ScheduleType = "warmup_stable_decay"
    """Shape of the learning rate after the warm-up. Only under constant can a finished run be made longer."""
    warmup_ratio: float | None = 0.06
    """Instead of --warmup_steps: the share of all optimizer steps, from 0 to 1."""

    LEARNING_RATES: ClassVar = (2e-3, 5e-5)


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config, load_data) as run:
        accelerator, config = run.accelerator, run.config
        if run.finished:
            return run.results
        best_by = evaluation.best_by(config, evaluation.computed_by_recipe(config, ("accuracy", "perplexity")))
        train, validation, tokenizer = load_data(config)
        run.check_data(train, validation)
        model = adapt_to_device(accelerator, config, build_model(config, tokenizer))
        collate, sequences = pack_or_pad(model, train, tokenizer, accelerator, config)
        lengths = collate.padded_lengths(train.lengths)
        plan = Plan.of_run(config, accelerator, lengths=lengths, weights=train.masked, packed=collate.packed)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
            """A micro-batch's share of the mean loss of its global batch."""
            targets = batch.pop("labels")
            losses = F.cross_entropy(model(**batch).logits, targets, reduction="none")
            return losses.sum() / micro_batch.normalizer

        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss)

        data = f"{len(train):,} training and {len(validation):,} validation pieces, {train.lengths.sum():,} tokens"
        score = partial(evaluate, accelerator, model, plan, validation, collate)
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


def evaluate(accelerator: Any, model: Any, plan: Plan, data: MaskedDocuments, collate: Any) -> dict[str, float]:
    """Loss, accuracy and pseudo-perplexity at masked tokens of `data`, always the same; {} if a signal cut it short."""

    def predict(model: Any, micro_batch: MicroBatch, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Right predictions and the sum of the losses of each piece."""
        targets = batch.pop("labels")
        logits = model(**batch).logits
        losses, hits = F.cross_entropy(logits, targets, reduction="none"), (logits.argmax(1) == targets).float()
        counts = torch.from_numpy(data.masked[micro_batch.samples]).to(accelerator.device)  # of each piece
        return torch.segment_reduce(hits, "sum", lengths=counts), torch.segment_reduce(losses, "sum", lengths=counts)

    batches = feed(plan.evaluation(collate.padded_lengths(data.lengths)), data, collate, accelerator.device)
    if (found := evaluation.collect(accelerator, model, batches, predict, (len(data),))) is None:
        return {}
    hits, losses, _ = found
    loss, accuracy = (float(each.sum() / data.masked.sum()) for each in (losses, hits))
    return {"eval_loss": loss, "eval_accuracy": accuracy, "eval_perplexity": float(np.exp(loss))}


# Replace from here down to train on your own data and model.


def load_data(config: Config) -> tuple[MaskedDocuments, MaskedDocuments, Any]:
    """Training and validation data, and the tokenizer."""
    parts = load_documents(config, config.text_column_name)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        sample = first_texts(parts[0], TOKENIZER_BYTES)
        tokenizer = train_tokenizer(sample, ("text",), config.tokenizer_type, config.vocab_size, config.max_length)
    shares = (config.mask_replace_prob, config.random_replace_prob)
    masking = masking_for(tokenizer, config.mlm_probability, *shares, config.whole_word_masking)
    always_the_same = masking_for(tokenizer, EVALUATION_PROBABILITY)
    around = special_tokens_around(tokenizer)
    train, held_out = tokenize_parts(parts, tokenizer, config)
    data = MaskedDocuments(*train, config.max_length, around, masking, config.seed)
    return data, MaskedDocuments(*held_out, config.max_length, around, always_the_same, 0), tokenizer


def build_model(config: Config, tokenizer: Any) -> torch.nn.Module:
    """A pretrained model with its head, or a new one without dropout."""
    torch.manual_seed(config.seed)
    if config.model_name_or_path:
        model = load_pretrained("AutoModelForMaskedLM", config.model_name_or_path, config.revision)
    else:
        model = new_encoder("AutoModelForMaskedLM", config, tokenizer, vocab_multiple=64)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_max_length(config.max_length, model.config)
    predict_only_masked(model)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


if __name__ == "__main__":
    run_command(main, Config)
