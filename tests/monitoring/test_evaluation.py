"""The evaluation counts each sample once on any number of processes and computes scikit-learn's metrics."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared.config.options import Options
from shared.errors import UserError
from shared.metrics.task_metrics import TaskMetrics
from shared.monitoring import evaluation
from shared.plan.batches import MicroBatch
from shared.processes.collectives import on_main_process


class World:
    """Processes simulated by threads: each calls `reduce` once and gets the sum of the tensors of all."""

    def __init__(self, size: int) -> None:
        self.size, self.brought, self.barrier = size, [], threading.Barrier(size, timeout=10)
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=self.reduce)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        self.brought.append(tensor)
        self.barrier.wait()
        return torch.stack(self.brought).sum(0)

    def gather(self, shares: list[list[int]], rows: torch.Tensor, total: int) -> list[Any]:
        """What `gather_rows` returns or raises on each process, when process i has the samples shares[i]."""

        def process(share: list[int]) -> Any:
            indices = np.array(share, dtype=np.int64)
            try:
                return evaluation.gather_rows(self.accelerator, indices, rows[indices], total)
            except AssertionError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(process, shares))


@st.composite
def divided(draw: st.DrawFn, most: int = 40) -> tuple[int, list[list[int]]]:
    """A number of samples, and the samples of each process in their order; a process may have none."""
    total, world = draw(st.integers(1, most)), draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, world - 1), min_size=total, max_size=total))
    order = draw(st.permutations(range(total)))
    return total, [[i for i in order if owners[i] == rank] for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(
    divided(),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
)
def test_gathered_rows_are_exact_and_in_dataset_order_on_every_process(
    division: tuple[int, list[list[int]]], dtype: torch.dtype, trailing: tuple[int, ...]
) -> None:
    total, shares = division
    rows = (torch.randn(total, *trailing, dtype=torch.float64) * 1e6).to(dtype)
    for gathered in World(len(shares)).gather(shares, rows, total):
        assert gathered.dtype == dtype
        assert torch.equal(gathered, rows)


@settings(max_examples=40, deadline=None)
@given(divided(), st.data())
def test_a_sample_evaluated_twice_or_never_is_an_error_on_every_process(
    division: tuple[int, list[list[int]]], data: st.DataObject
) -> None:
    total, shares = division
    sample = data.draw(st.integers(0, total - 1))
    if data.draw(st.booleans()):
        times = 2
        shares[data.draw(st.integers(0, len(shares) - 1))].append(sample)
    else:
        times = 0
        shares = [[i for i in share if i != sample] for share in shares]
    for outcome in World(len(shares)).gather(shares, torch.ones(total, 2), total):
        assert isinstance(outcome, AssertionError)
        assert str(outcome) == f"sample {sample} of {total} was evaluated {times} times, not once"


def test_a_loss_that_is_not_finite_keeps_its_place() -> None:
    rows = torch.tensor([1.0, torch.nan, torch.inf, 2.0])
    for gathered in World(2).gather([[0, 1], [3, 2]], rows, 4):
        torch.testing.assert_close(gathered, rows, equal_nan=True, rtol=0, atol=0)


def test_rows_in_a_type_whose_sum_rounds_are_refused() -> None:
    with pytest.raises(AssertionError, match="bfloat16"):
        evaluation.gather_rows(World(1).accelerator, np.arange(2), torch.ones(2, dtype=torch.bfloat16), 2)


BATCH = 2


def classified(total: int) -> np.ndarray:
    """[total, 2] predicted and true classes."""
    return np.random.default_rng(total).integers(0, 3, (total, 2))


def evaluate_in_group(rank: int, folder: Path) -> None:
    """Run one process of three real groups (of 3, 2 and 1 processes), on data sets of every relevant size."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }  # Accelerate requires them; the group uses a file
    cases = []
    for world in (3, 2, 1):
        if rank >= world:
            break
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            store = f"file://{folder / f'store_{world}'}"
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        else:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world
        for total in range(1, 2 * world * BATCH + 2):
            batches = np.split(np.random.default_rng(0).permutation(total), range(BATCH, total, BATCH))
            indices = np.concatenate([np.empty(0, np.int64), *batches[rank::world]])
            rows = torch.from_numpy(classified(total)[indices])
            predictions, references = evaluation.gather_rows(accelerator, indices, rows, total).numpy().T
            found = on_main_process(
                accelerator, lambda p=predictions, r=references: [p.tolist(), r.tolist(), os.getpid()]
            )
            cases.append([world, total, *found])
        if world > 1:
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    (folder / f"cases_{rank}.json").write_text(json.dumps(cases))


def test_real_groups_of_3_2_and_1_processes_get_scikit_learns_accuracy_for_every_size(tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score

    runs.fork(evaluate_in_group, (tmp_path,), 3)
    main, second, third = (json.loads((tmp_path / f"cases_{rank}.json").read_text()) for rank in range(3))
    sizes = [(world, total) for world in (3, 2, 1) for total in range(1, 2 * world * BATCH + 2)]
    assert [(world, total) for world, total, *_ in main] == sizes
    for _, total, predictions, references, _ in main:
        whole_predictions, whole_references = classified(total).T
        assert accuracy_score(references, predictions) == accuracy_score(whole_references, whole_predictions)
        assert (predictions, references) == (whole_predictions.tolist(), whole_references.tolist())
    assert len({pid for *_, pid in main}) == 1  # the main process computed all of them
    assert second == [case for case in main if case[0] >= 2]
    assert third == [case for case in main if case[0] >= 3]


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_and_probabilities_of_all_processes_are_gathered_in_pieces_in_dataset_order(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "NUMBERS_AT_ONCE", 4 * 3)  # four samples with probabilities, six without
    total = 10
    metrics = TaskMetrics(num_labels=3, asked=("roc_auc",))
    logits = torch.randn(total, 3)
    shares = np.array_split(np.random.default_rng(0).permutation(total - 1), world)
    shares[-1] = np.append(shares[-1], total - 1)
    barrier, table = threading.Barrier(world, timeout=10), {}

    def process(rank: int) -> Any:
        calls = iter(range(100))

        def reduce(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
            table[call := next(calls), rank] = tensor
            barrier.wait()
            return torch.stack([table[call, other] for other in range(world)]).sum(0)

        accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            reduce=reduce,
            is_main_process=rank == 0,
            num_processes=1,  # the signals of a single process
            is_fsdp2=False,
            unwrap_model=lambda model: model,
        )
        batches = [  # a repeat that is not counted changes nothing
            (MicroBatch(0, 0, shares[rank], shares[rank], total, counted), logits[shares[rank]])
            for counted in (True, False)
        ]
        found = evaluation.collect(
            accelerator,
            nn.Identity(),
            batches,
            lambda _, __, mine: (mine.argmax(1), mine[:, 0], mine),
            (total,),
            metrics,
        )
        assert found
        return found

    with ThreadPoolExecutor(world) as pool:
        everywhere = list(pool.map(process, range(world)))
    first, *others = (probabilities for *_, probabilities in everywhere)
    assert first.dtype == np.float32
    assert np.array_equal(first, logits.softmax(1).numpy())
    assert others == [None] * (world - 1)
    for predictions, losses, _ in everywhere:
        assert np.array_equal(predictions, logits.argmax(1).double().numpy())
        assert np.array_equal(losses, logits[:, 0].double().numpy())


@pytest.mark.parametrize(
    ("name", "greater"),
    [
        *[("eval_accuracy", True), ("macro_f1", True), ("pearson", True), ("eval_spearmanr", True)],
        *[("loss", False), ("eval_loss", False), ("mean_squared_error", False), ("mse", False), ("perplexity", False)],
    ],
)
def test_losses_and_errors_are_better_when_lower(name: str, greater: bool) -> None:
    assert evaluation.greater_is_better(name) is greater


def test_a_score_that_the_validation_data_leave_undefined_cannot_choose_the_best_model() -> None:
    computed = evaluation.ScoreNames(("accuracy", "roc_auc"), {"roc_auc": "there is one class"})
    assert evaluation.best_by(Options(), computed).name == "eval_accuracy"
    assert not evaluation.best_by(Options(metric_for_best_model="loss"), computed).greater_is_better
    for name, why in {
        "roc_auc": "cannot tell which model is best: there is one class",
        "f1": "is not computed",
    }.items():
        with pytest.raises(UserError, match=f"--metric_for_best_model {name} {why}"):
            evaluation.best_by(Options(metric_for_best_model=name), computed)
