"""The pass over the validation data on any number of processes, which counts each sample once, in dataset order."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shared.checkpoints.progress import BestBy
from shared.config.options import Options
from shared.errors import UserError
from shared.plan.batches import MicroBatch
from shared.plan.draws import seed_dropout
from shared.processes import signals

NUMBERS_AT_ONCE = 2**24  # that travel in one collective call: 64 or 128 MiB
SAME = 1e-3  # relative, of scores: kinds of machines round differently
LOWER_IS_BETTER = {"loss", "nll", "error", "mse", "rmse", "mae", "mape", "smape", "mase", "brier", "perplexity"}
LOWER_IS_BETTER |= {"wer", "cer", "ter"}  # error rates of words, characters and translations


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The modules of a model are in evaluation mode; afterwards, each has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def gather_rows(accelerator: Any, indices: np.ndarray | torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """The rows of all processes in dataset order, on every process, each sample counted exactly once.

    Every process calls this once, with the rows it computed. A process that computed none passes an empty tensor of the
    same trailing shape and dtype. The caller leaves out batches that are repeated only to keep processes in step
    (FSDP). Accelerate's `gather_for_metrics` loses or repeats samples when batches vary in size.

    Args:
        accelerator: has the device and sums over processes.
        indices: [n] the dataset's sample number of each row.
        rows: [n, ...] float32, float64 or int64; predictions rather than logits, as every process holds the result.
        total: number of samples in the dataset.

    Returns:
        [total, ...] on the accelerator's device; row i belongs to sample i.

    Raises:
        AssertionError: on every process, when a sample is missing or came more than once; names the first such sample.
    """
    assert rows.dtype in (torch.float32, torch.float64, torch.int64), f"rows are {rows.dtype}: a sum would be inexact"
    assert len(indices) == len(rows), f"{len(indices)} indices for {len(rows)} rows"
    flat = rows.detach().reshape(len(rows), rows.shape[1:].numel())
    # One collective: each row goes into a table of zeros, and x + 0 is exact. A last column of ones counts the rows.
    counted = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1).to(accelerator.device)
    table = counted.new_zeros(total, counted.shape[1])
    table.index_add_(0, torch.as_tensor(indices, dtype=torch.int64, device=accelerator.device), counted)
    table = accelerator.reduce(table, reduction="sum")
    times = table[:, -1]
    wrong = (times != 1).nonzero().flatten().tolist()
    assert not wrong, f"sample {wrong[0]} of {total} was evaluated {int(times[wrong[0]])} times, not once"
    return table[:, :-1].reshape(total, *rows.shape[1:])


@torch.inference_mode()
def collect(
    accelerator: Any,
    model: Any,
    batches: Iterable[tuple[MicroBatch, Any]],
    predict: Callable[[Any, MicroBatch, Any], Sequence[torch.Tensor]],
    shape: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Predict a whole data set, each process its share. Every process calls this.

    Args:
        model: as the loop calls it; it is in evaluation mode during the pass.
        batches: of this process: `feed` of `Plan.evaluation`.
        predict: called with the unwrapped model, the micro-batch and its batch; gives predictions [rows] or
            [rows, labels] and losses [rows] first, and what else it gives is ignored.
        shape: of the predictions: (samples,) or (samples, labels).

    Returns:
        Predictions of `shape` and losses [samples] on every process, in the order of the data. None if a signal cut the
        pass short.

    Raises:
        UserError: predictions or losses have another shape.
    """
    model = accelerator.unwrap_model(model)  # DDP's wrapper would wait for processes that have no batch
    numbers: list[np.ndarray] = []
    rows: list[torch.Tensor] = []
    with evaluating(model):
        for micro_batch, batch in signals.watch(accelerator, batches):
            seed_dropout(accelerator.device, 0, micro_batch.step, micro_batch.index)
            predictions, losses, *_ = predict(model, micro_batch, batch)
            count = len(micro_batch.samples)
            if losses.shape != (count,) or predictions.numel() != count * math.prod(shape[1:]):
                raise UserError(
                    f"evaluate: {count} samples have predictions {[*predictions.shape]} and losses {[*losses.shape]}, "
                    f"not {[count, *shape[1:]]} and [{count}] (evaluation.collect in docs/your_own_recipe.md)"
                )
            if micro_batch.counted:
                numbers.append(micro_batch.samples)
                columns = losses[:, None], predictions.reshape(count, -1)
                rows.append(torch.cat([each.double() for each in columns], dim=1))  # losses in bf16 would round classes
    if signals.heard.cut_short:
        return None
    table = np.empty((shape[0], 1 + math.prod(shape[1:])))
    gather_into(table, shape[0], accelerator, numbers, rows)
    return table[:, 1:].reshape(shape), table[:, 0]


def gather_into(
    table: np.ndarray, total: int, accelerator: Any, numbers: Sequence[np.ndarray], rows: Sequence[torch.Tensor]
) -> None:
    """Fill `table` with the rows of all processes in the order of the dataset; an empty table stays empty.

    A thousand classes take 4 kB per sample, so the rows are gathered and copied from the device in pieces.

    Args:
        table: [total, width], or [0, width] on a process that needs no result.
        total, accelerator: see `gather_rows`.
        numbers: of the samples of each batch of this process.
        rows: [samples, width] of each batch, in the type of `table`.
    """
    width, samples = table.shape[1], np.concatenate([np.empty(0, np.int64), *numbers])
    mine = torch.cat([*rows]) if rows else torch.from_numpy(np.empty((0, width), table.dtype))
    at_once = max(1, NUMBERS_AT_ONCE // width)
    for start in range(0, total, at_once):
        inside = np.flatnonzero((start <= samples) & (samples < start + at_once))
        count = min(at_once, total - start)
        part = gather_rows(accelerator, samples[inside] - start, mine[torch.from_numpy(inside)], count)
        if len(table):
            table[start : start + count] = part.cpu().numpy()


def differing_scores(best_by: BestBy, results: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str:
    """How scores of other processes differ from those of the main process, as a sentence; "" if they are equal.

    Only the scores that `best_by` names are compared: others, such as times, may differ.
    """
    mine, *theirs = ([each.get(name, math.nan) for name in best_by.names] for each in (results, *others))
    for rank, (scores, values) in enumerate(zip(others, theirs, strict=True), start=1):
        if not np.allclose(values, mine, rtol=SAME, equal_nan=True):
            return (
                f"evaluate returned {dict(results)} on rank 0 and {dict(scores)} on rank {rank}: each process has only "
                "a share of the validation data, and evaluation.collect gives it all (docs/your_own_recipe.md)"
            )
    return ""


def best_by(config: Options, names: Sequence[str], undefined: Mapping[str, str] | None = None) -> BestBy:
    """Which evaluation number decides the best model: --metric_for_best_model, or the main metric of the task.

    Args:
        config: the flags.
        names: of the scores that the evaluations compute, the main one first, without the prefix "eval_".
        undefined: those that cannot compare models on this data, and why.

    Raises:
        UserError: --metric_for_best_model is not computed, or cannot compare models on this data.
    """
    known, name = ("loss", *names), (config.metric_for_best_model or names[0]).removeprefix("eval_")
    if name not in known:
        raise UserError(f"--metric_for_best_model {name} is not computed: use one of {', '.join(known)}")
    if config.metric_for_best_model and undefined and name in undefined:
        raise UserError(f"--metric_for_best_model {name} cannot tell which model is best: {undefined[name]}")
    greater = greater_is_better(name, config.greater_is_better)
    return BestBy(f"eval_{name}", greater, tuple(f"eval_{each}" for each in names))


def greater_is_better(name: str, given: bool | None = None) -> bool:
    """Whether a larger value of this metric is better: as `given`, or True unless its name means a loss or an error."""
    return LOWER_IS_BETTER.isdisjoint(name.lower().split("_")) if given is None else given
