"""Predict the progression of diabetes from ten measurements, with an MLP, on any number of processes."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import default_collate

from shared.config.options import Options
from shared.monitoring import evaluation
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, make_schedule, set_learning_rate, step_if_finite
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout
from shared.plan.in_memory import InMemory
from shared.plan.loading import Loader, feed
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun

MEASUREMENTS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
CENTER, SPREAD = 152, 77  # of the progressions, about


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Regression on a table."""

    hidden_size: int = 64
    """Width of the hidden layer."""
    learning_rate: float | None = 0.01
    """Peak learning rate."""
    num_train_epochs: int = 10
    """Passes over the training data."""


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config, load_data) as run:
        accelerator, config = run.accelerator, run.config
        if run.finished:
            return run.results
        train, validation = load_data(config)
        run.check_data(train, validation)
        best_by = evaluation.best_by(config, evaluation.computed_by_recipe(config, ("r2",)))
        model = build_model(config)
        plan = Plan.of_run(config, accelerator, num_samples=len(train))
        loader = Loader(train, plan, default_collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def compute_loss(micro_batch: MicroBatch, batch: list[Tensor]) -> Tensor:
            return predict_batch(model, micro_batch, batch)[1].sum() / micro_batch.normalizer

        def evaluate() -> dict[str, float]:
            batches = feed(plan.evaluation(validation.lengths), validation, default_collate, accelerator.device)
            if (found := evaluation.collect(accelerator, model, batches, predict_batch, (len(validation),))) is None:
                return {}
            loss = float(found[1].mean())
            return {"eval_loss": loss, "eval_r2": 1 - loss / float(validation.tensors[1].var(correction=0))}

        model, optimizer, parameters = run.prepare(model, make_optimizer, loader, compute_loss)
        run.start(evaluate, best_by, card={"data": f"{len(train)} rows to train on"})
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
        return run.finish(model, processor=None)


def predict_batch(model: Any, _: MicroBatch, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted progressions and losses [rows], also of `python -m shared.predict`."""
    rows, targets = batch
    predictions = model(rows).squeeze(1)
    return predictions * SPREAD + CENTER, (predictions - targets).square()


def load_data(config: Config) -> tuple[InMemory, InMemory]:
    """The training data, and the first 88 rows as validation data."""
    found = load_diabetes()
    table = dict(zip(found.feature_names, found.data.T, strict=True)) | {"progression": found.target}
    parts = ({name: column[rows] for name, column in table.items()} for rows in (slice(88, None), slice(88)))
    train, validation = (encode(config, part) for part in parts)
    return train, validation


def encode(_: Config, table: Mapping[str, np.ndarray]) -> InMemory:
    """Measurements and progressions, scaled to about 1; a file of `python -m shared.predict` may lack the latter."""
    rows = np.stack([table[name] for name in MEASUREMENTS], axis=1)
    targets = table["progression"] if "progression" in table else np.full(len(rows), np.nan)
    return InMemory(torch.from_numpy(20 * rows).float(), torch.from_numpy((targets - CENTER) / SPREAD).float())


def build_model(config: Config) -> Any:
    """An MLP with one hidden layer."""
    torch.manual_seed(config.seed)
    return nn.Sequential(nn.Linear(10, config.hidden_size), nn.ReLU(), nn.Linear(config.hidden_size, 1))


if __name__ == "__main__":
    run_command(main, Config)
