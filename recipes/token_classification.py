"""Train a text encoder to tag words, such as named entities or parts of speech, on any number of processes.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/token_classification.py

Without arguments it learns what the names in Python functions refer to. With your own data and a pretrained encoder:

    ... recipes/token_classification.py --train_file train.conll --model_name_or_path google-bert/bert-base-cased

Expected: F1 0.87 of the entities after 2 epochs, in 49 s on 2 cores. The most frequent tag of each word: 0.73.
To copy: python -m shared.vendor recipes/token_classification.py FOLDER
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.cache.prepared import each_share
from shared.config.fields import CanBeZero
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
from shared.pretrained.from_pretrained import checkpoint_activations, head_for, load_classifier
from shared.pretrained.tokenizers import load_tokenizer, share_padding, special_tokens_around
from shared.processes.collectives import on_main_process
from shared.report.mistakes import Mistakes
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.tagging.pieces import TaggedWords, as_texts, begin_words_with_a_space, cut_words
from shared.tagging.tagged_texts import load_tagged
from shared.tagging.tags import SCORES, Tags, tagging_scores
from shared.text.tokenized import check_max_length, check_vocabulary, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Token classification: tags of words."""

    text_column_name: str = "tokens"
    """Column of the words of each text (lists), or of texts if --label_column_name has spans."""
    label_column_name: str = "tags"
    """Column of lists: the tags of the words (strings or ClassLabel numbers), or spans {start, end, label} of texts."""
    max_length: int = 128
    """Maximum length of a window in tokens. A longer text is cut into overlapping windows; no word is dropped."""
    stride: CanBeZero = 32
    """Number of tokens that consecutive windows of a text share."""
    packing: bool = True
    """Concatenate windows without padding and without attention between them. Otherwise: one window per row."""
    num_train_epochs: int = 2
    """Passes over the training data."""
    output_dir: str = "out/token_classification"
    """Folder of the run: report.html, config.yaml, metrics.jsonl, checkpoints/, model/."""
    learning_rate: float | None = None
    """Peak learning rate, reached after the warm-up. None: 1e-3 for a new encoder, 5e-5 for a pretrained one."""

    LEARNING_RATES: ClassVar = (1e-3, 5e-5)


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        best_by = evaluation.best_by(config, SCORES)
        train, validation, tags, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        model = adapt_to_device(accelerator, config, build_model(config, tags, tokenizer))
        collate, sequences = pack_or_pad(model, train, tokenizer, accelerator, config)
        sizes = {"lengths": train.lengths, "padded": collate.padded_lengths}
        plan = Plan.of_run(config, accelerator, **sizes, weights=train.num_words, packed=collate.packed)
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def compute_loss(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
            """The contribution of a micro-batch to the mean loss of the words of its global batch."""
            targets = batch.pop("labels")
            logits = model(**batch).logits  # of the first tokens of words only: see `predict_only_masked`
            losses = F.cross_entropy(logits, targets, reduction="none")
            return losses.sum() / micro_batch.normalizer

        wrong = Mistakes(tags.names, partial(validation.in_context, tokenizer))
        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss, wrong)

        data = f"{train} to train on, {validation} to validate on, {tags}"
        score = partial(evaluate, accelerator, model, plan, validation, collate, tags, wrong)
        run.start(score, best_by, lengths=train.lengths, card={"data": data, "sequences": sequences})
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
    accelerator: Any, model: Any, plan: Plan, data: TaggedWords, collate: Any, tags: Tags, wrong: Any
) -> dict[str, float]:
    """Loss per word and `tagging_scores` on `data`, in which each word counts once; {} if a signal interrupted it."""
    batches = feed(plan.evaluation(data.lengths, collate.padded_lengths), data, collate, accelerator.device)
    of_words = ((replace(each, samples=data.words_of(each.samples)), batch) for each, batch in batches)
    if (found := evaluation.collect(accelerator, model, of_words, predict_batch, (int(data.num_words.sum()),))) is None:
        return {}
    wrong.keep(found[0], found[1], data.tags[data.pieces.words])
    predicted = data.tags_of_all(found[0].astype(int), tags.outside)
    scores = on_main_process(accelerator, lambda: tagging_scores(tags, predicted, data.tags, data.begins))
    return {"eval_loss": float(found[1].mean())} | {f"eval_{name}": value for name, value in scores.items()}


def predict_batch(model: Any, _: MicroBatch, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted tags [words], losses [words] and logits [words, tags], also of `python -m shared.predict`."""
    targets = batch.pop("labels")
    logits = model(**batch).logits
    return logits.argmax(1), F.cross_entropy(logits, targets, reduction="none"), logits


# To train with your own data or model, replace the functions below.


def load_data(config: Config) -> tuple[TaggedWords, TaggedWords, Tags, Any]:
    """Training and validation data, the tags, and the tokenizer."""
    *tables, tags = load_tagged(config)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        texts = as_texts(tables[0])
        tokenizer = train_tokenizer(texts, ("text",), config.tokenizer_type, config.vocab_size, config.max_length)
    tokenizer = begin_words_with_a_space(tokenizer)
    train, validation = each_share(lambda table: encode(config, table, tags, tokenizer), tables)
    return train, validation, tags, tokenizer


def encode(config: Config, table: Any, tags: Tags, tokenizer: Any) -> TaggedWords:
    """The windows and tags of the words of a table, also of the file of `python -m shared.predict`."""
    pieces, around = cut_words(table, tokenizer), special_tokens_around(tokenizer)
    return TaggedWords(pieces, tags.encode(table), config.max_length, config.stride, around)


def build_model(config: Config, tags: Tags, tokenizer: Any) -> torch.nn.Module:
    """A pretrained encoder with a head for the tags, or a new one: pre-norm, rotary positions, no dropout."""
    torch.manual_seed(config.seed)
    auto_class, head = "AutoModelForTokenClassification", head_for(tags.names)
    if config.model_name_or_path:
        model = load_classifier(auto_class, config.model_name_or_path, revision=config.revision, **head)
    else:
        model = new_encoder(auto_class, config, tokenizer, **head)
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config)
    check_max_length(config.max_length, model.config)
    predict_only_masked(model, config.packing)  # here: only first pieces of words
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


if __name__ == "__main__":
    run_command(main, Config)
