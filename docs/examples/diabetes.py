"""Predict the progression of diabetes from ten measurements, with an MLP, on any number of processes."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

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
from shared.plan.loading import InMemory, Loader, feed
from shared.run.command import run as run_command
from shared.run.training_run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Regression on a table."""

    hidden_size: int = 64
    """Width of the hidden layer."""
    learning_rate: float | None = 0.01
    """Peak learning rate."""
    num_train_epochs: int = 10
    """Passes over the training data."""


def load_data(config: Config) -> tuple[InMemory, InMemory]:
    """The training data, and the first 88 rows as validation data; scaled to about 1."""
    rows, targets = (torch.from_numpy(each).float() for each in load_diabetes(return_X_y=True))
    targets = (targets - targets[88:].mean()) / targets[88:].std()
    return InMemory(20 * rows[88:], targets[88:]), InMemory(20 * rows[:88], targets[:88])


def main(config: Config) -> dict[str, float]:
    with TrainingRun(config) as run:
        accelerator, config = run.accelerator, run.config
        train, validation = load_data(config)
        run.check_data(train, validation)
        if run.finished:
            return run.results
        best_by = evaluation.best_by(config, ("r2",))
        torch.manual_seed(config.seed)
        model: Any = nn.Sequential(nn.Linear(10, config.hidden_size), nn.ReLU(), nn.Linear(config.hidden_size, 1))
        plan = Plan.of_run(config, accelerator, num_samples=len(train))
        loader = Loader(train, plan, default_collate, accelerator.device, config.dataloader_num_workers)
        schedule = make_schedule(config, plan.total_steps)

        def losses_of(model: Any, _: MicroBatch, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
            predictions = model(batch[0]).squeeze(1)
            return predictions, (predictions - batch[1]).square()

        def compute_loss(micro_batch: MicroBatch, batch: list[Tensor]) -> Tensor:
            return losses_of(model, micro_batch, batch)[1].sum() / micro_batch.normalizer

        def evaluate() -> dict[str, float]:
            batches = feed(plan.evaluation(validation.lengths), validation, default_collate, accelerator.device)
            if (found := evaluation.collect(accelerator, model, batches, losses_of, (len(validation),))) is None:
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
        return run.finish(model)


if __name__ == "__main__":
    run_command(main, Config)
