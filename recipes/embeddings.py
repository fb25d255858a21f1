"""Train a text encoder to give similar texts similar embeddings, by contrastive learning from pairs.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/embeddings.py

Without arguments it learns to find the source of a function by its docstring. With your own data and encoder:

    ... recipes/embeddings.py --train_file pairs.csv --text_column_names query answer --model_name_or_path FOLDER

Expected: nDCG@10 0.42 and recall@10 0.59 after 2 epochs, in 88 s on 2 cores. TF-IDF reaches 0.75 and 0.91.
To copy: python -m shared.vendor recipes/embeddings.py FOLDER
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from shared.cache.prepared import each_share
from shared.config.fields import Limits, Meaning
from shared.contrastive import tuples
from shared.contrastive.gradient_cache import GradientCache
from shared.contrastive.losses import WITHOUT_SCORES, check_dims, objective_of
from shared.contrastive.models import LOADING, Pooling, SentenceTokenizer, add_pooling, check_modules, static_model
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
from shared.pretrained.tokenizers import load_tokenizer, share_padding
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun
from shared.text.tokenized import check_max_length, check_vocabulary, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions):
    """Sentence embeddings."""

    text_column_names: tuple[str, ...] = ("anchor", "positive")
    """Columns of the anchors, the positives and any hard negatives. A column of negatives may have lists of texts."""
    label_column_name: str | None = None
    """Column of numbers, the similarity of the two texts of each row. None: an anchor belongs to its positive."""
    corpus_file: Annotated[tuple[str, ...] | None, Meaning.NAMES_DATA] = None
    """File with a column of further texts that each evaluation searches. None: the validation positives alone."""
    prompts: tuple[str, ...] | None = None
    """Texts put before each text, one per column, such as "query: " "passage: ". None: no prompts."""
    max_length: tuple[int, ...] = (64,)
    """Maximum number of tokens of a text with its prompt; further ones are cut off. One number, or one per column."""
    packing: bool = True
    """Concatenate the texts of a micro-batch without padding and without attention between them. Off: one per row."""
    static: bool = False
    """Train one vector per token and no layers. The vectors begin as the input embeddings of the model."""
    pooling: Pooling = "mean"
    """The embedding of a text: the mean over its tokens, or the first token."""
    temperature: Annotated[float, Limits(above=0)] = 0.05
    """Divides the cosines of embeddings in the loss. It is 1 / scale of sentence-transformers."""
    symmetric: bool = False
    """The loss is the mean of finding the positive of each anchor and of finding the anchor of each positive."""
    false_negative_margin: Annotated[float | None, Limits(least=-2, most=2)] = None
    """Leave out negatives whose cosine with the anchor exceeds the positive's by more than this. None: none."""
    matryoshka_dims: tuple[int, ...] | None = None
    """The loss is the mean over these numbers of first dimensions, such as 128 64 32. None: all dimensions."""
    global_batch_size: int | None = 128
    """Samples per optimizer step, over all processes and micro-batches. The loss compares all of them."""
    kept_micro_batches: Annotated[int | None, Meaning.NOT_IN_RESULT] = None
    """Micro-batches per process computed once, not twice. None: all that fit, or one with --gradient_checkpointing."""
    num_train_epochs: int = 2
    """Passes over the training data."""
    output_dir: str = "out/embeddings"
    """Folder of the run: report.html, config.yaml, metrics.jsonl, checkpoints/, model/."""
    learning_rate: float | None = None
    """Peak learning rate. None: 1e-3 for a new encoder, 5e-5 for a pretrained one, 5e-4 for LoRA, 0.01 for --static."""

    LEARNING_RATES: ClassVar = (1e-3, 5e-5)
    SAVES_MEMORY: ClassVar = "--kept_micro_batches 1"
    EXCLUDES: ClassVar = (*TextOptions.EXCLUDES, *WITHOUT_SCORES)

    def default_learning_rate(self) -> float:
        """As in the base class; that of static models does not depend on their origin."""
        return 0.01 if self.static else super().default_learning_rate()


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        objective = objective_of(config)
        best_by = evaluation.best_by(config, objective.names)
        train, validation, tokenizer = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        model = adapt_to_device(accelerator, config, build_model(config, tokenizer))
        collate, rows = tuples.pack_or_pad_tuples(model, train, tokenizer, accelerator, config)
        plan = Plan.of_run(config, accelerator, **train.sizes(collate))
        loader = Loader(train, plan, collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def embed(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
            """The embeddings of all texts of a micro-batch; each call draws the same dropout."""
            seed_dropout(accelerator.device, config.seed, micro_batch.step, micro_batch.index)
            return model(**{name: value for name, value in batch.items() if name != "labels"}).logits

        kept = config.kept_micro_batches or (1 if config.gradient_checkpointing else None)
        cache = GradientCache(accelerator, plan, objective, embed, kept)
        width, compute_loss = model.config.hidden_size, cache.loss
        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss)

        data = f"{len(train):,} training and {len(validation):,} validation samples; {rows}"
        score = partial(evaluate, accelerator, objective, model, width, plan, validation, collate)
        run.start(score, best_by, lengths=train.text_lengths, card={"data": data})
        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            micro_batches = list(loader.micro_batches(step))
            cache.fill(model, micro_batches)  # the first pass: the gradient of the loss for each embedding
            for micro_batch, batch in micro_batches:
                with accelerator.trigger_sync_in_backward(model) if micro_batch.last else accelerator.no_sync(model):
                    loss = compute_loss(micro_batch, batch)
                    gradients.backward(accelerator, loss)
                run.count(micro_batch, loss)
            grad_norm = gradients.clip(accelerator, parameters, config.max_grad_norm)
            skipped = step_if_finite(accelerator, optimizer, grad_norm)
            gradients.set_to_none(parameters)
            run.end_step(skipped, grad_norm, schedule(step))
            run.evaluate_if_due()
            run.save_if_due()
        return run.finish(model, SentenceTokenizer(tokenizer, config, width), note=LOADING)


def evaluate(
    accelerator: Any, objective: Any, model: Any, width: int, plan: Plan, data: tuples.TextTuples, collate: Any
) -> dict[str, float]:
    """Loss and scores of the objective, from the embeddings of all texts of `data`; {} if a signal interrupted it."""
    every = []

    def of_batch(*given: Any) -> tuple[Tensor, Tensor]:
        embeddings = predict_batch(*given)
        return embeddings, embeddings.new_zeros(len(embeddings))  # the loss is one of all texts together

    for texts in data.texts:
        batches = feed(plan.evaluation(texts.lengths, collate.padded_lengths), texts, collate, accelerator.device)
        if (found := evaluation.collect(accelerator, model, batches, of_batch, (len(texts), width))) is None:
            return {}
        every.append(torch.from_numpy(found[0]).to(accelerator.device, torch.float32))
    return objective.evaluate(accelerator, every, data)


def predict_batch(model: Any, _: MicroBatch, batch: dict[str, Any]) -> Tensor:
    """The normalized embeddings [texts, dimensions], also of `python -m shared.predict`."""
    return torch.nn.functional.normalize(model(**batch).logits.float(), dim=1)


# To train with your own data or model, replace the functions below.


def load_data(config: Config) -> tuple[tuples.TextTuples, tuples.TextTuples, Any]:
    """Training and validation data, and the tokenizer. Validation needs no hard negatives."""
    pair, longest = config.text_column_names[:2], max(config.max_length)
    train, validation = tuples.load_tuples(config)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        tokenizer = train_tokenizer(train, pair, config.tokenizer_type, config.vocab_size, longest)
    parts = [(config, train), (tuples.of_columns(config, pair), validation), *tuples.corpus_of(config)]
    first, second, *corpus = each_share(lambda part: encode(*part, tokenizer), parts)
    return first, second.with_corpus(*corpus), tokenizer


def encode(config: Config, table: Any, tokenizer: Any) -> tuples.TextTuples:
    """The texts of a table, also of the file of `python -m shared.predict`."""
    return tuples.tokenize_tuples(table, config, tokenizer)


def build_model(config: Config, tokenizer: Any) -> torch.nn.Module:
    """A pretrained encoder, or a new one without dropout; with the embeddings of texts as its output `logits`."""
    torch.manual_seed(config.seed)
    if config.model_name_or_path:
        check_modules(config)
        model = load_pretrained("AutoModel", config.model_name_or_path, config.revision)
    else:
        model = new_encoder("AutoModel", tuples.with_one_length(config), tokenizer)
    model = static_model(model, config.pooling) if config.static else model
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config)
    check_max_length(max(config.max_length), model.config)
    check_dims(config.matryoshka_dims or (), model.config.hidden_size)
    add_pooling(model, config.pooling)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


if __name__ == "__main__":
    run_command(main, Config)
