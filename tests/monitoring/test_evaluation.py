"""The evaluation counts each sample once on any number of processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared.config.options import Options
from shared.errors import UserError
from shared.metrics.task_metrics import Scorer, TaskMetrics
from shared.monitoring import evaluation
from shared.plan.batches import MicroBatch


class World:
    """Processes simulated by threads: `reduce` gives each the sum of the tensors that all bring to the same call."""

    def __init__(self, size):
        self.size, self.brought = size, {}
        self.barrier = threading.Barrier(size, timeout=10)

    def accelerator(self, rank):
        """What a process sees."""
        calls = iter(range(100))

        def reduce(tensor, reduction):
            assert reduction == "sum"
            self.brought[call := next(calls), rank] = tensor
            self.barrier.wait()
            return torch.stack([self.brought[call, other] for other in range(self.size)]).sum(0)

        return SimpleNamespace(
            device=torch.device("cpu"),
            reduce=reduce,
            is_main_process=rank == 0,
            num_processes=1,  # the signals of a single process
            is_fsdp2=False,
            unwrap_model=lambda model: model,
        )

    def run(self, process):
        """What `process` returns or raises on each process, called with its rank and accelerator."""

        def outcome(rank):
            try:
                return process(rank, self.accelerator(rank))
            except AssertionError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(outcome, range(self.size)))


def gathered_from(shares, rows, total):
    """What `gather_rows` returns or raises on each process, when process i has the samples shares[i]."""

    def process(rank, accelerator):
        indices = np.array(shares[rank], dtype=np.int64)
        return evaluation.gather_rows(accelerator, indices, rows[indices], total)

    return World(len(shares)).run(process)


@st.composite
def divided(draw, most=40):
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
    st.sampled_from([1.0, torch.nan, torch.inf]),
)
def test_gathered_rows_are_exact_and_in_dataset_order_on_every_process(division, dtype, trailing, factor):
    total, shares = division
    rows = torch.randn(total, *trailing, dtype=torch.float64) * 1e6
    rows[total // 2] *= factor if dtype.is_floating_point else 1
    for gathered in gathered_from(shares, rows.to(dtype), total):
        torch.testing.assert_close(gathered, rows.to(dtype), equal_nan=True, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(divided(), st.data())
def test_a_sample_evaluated_twice_or_never_is_an_error_on_every_process(division, data):
    total, shares = division
    sample = data.draw(st.integers(0, total - 1))
    if data.draw(st.booleans()):
        times = 2
        shares[data.draw(st.integers(0, len(shares) - 1))].append(sample)
    else:
        times = 0
        shares = [[i for i in share if i != sample] for share in shares]
    for outcome in gathered_from(shares, torch.ones(total, 2), total):
        assert isinstance(outcome, AssertionError)
        assert str(outcome) == f"sample {sample} of {total} was evaluated {times} times, not once"


def test_rows_in_a_type_whose_sum_rounds_are_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        evaluation.gather_rows(World(1).accelerator(0), np.arange(2), torch.ones(2, dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_and_probabilities_of_all_processes_are_gathered_in_pieces_in_dataset_order(world, monkeypatch):
    monkeypatch.setattr(evaluation, "NUMBERS_AT_ONCE", 4 * 3)  # four samples with probabilities, six without
    total = 10
    metrics = TaskMetrics(num_labels=3, asked=("roc_auc",))
    logits = torch.randn(total, 3)
    shares = np.array_split(np.random.default_rng(0).permutation(total - 1), world)
    shares[-1] = np.append(shares[-1], total - 1)

    def process(rank, accelerator):
        batches = [  # a repeat that is not counted changes nothing
            (MicroBatch(0, 0, shares[rank], shares[rank], total, counted), logits[shares[rank]])
            for counted in (True, False)
        ]

        def predict(model, _, mine):
            assert not model.training
            return mine.argmax(1) + 1000, mine[:, 0].bfloat16(), mine  # bf16 cannot hold these classes

        scorer = Scorer(metrics, predict)
        model = nn.Sequential(nn.Identity(), nn.Identity().eval())  # a recipe may keep a part in evaluation mode
        found = evaluation.collect(accelerator, model, batches, scorer, (total,))
        assert [part.training for part in model.modules()] == [True, True, False]
        return *found, scorer.probabilities(accelerator, total)

    everywhere = World(world).run(process)
    first, *others = (probabilities for *_, probabilities in everywhere)
    assert first.dtype == np.float32
    assert np.array_equal(first, logits.softmax(1).numpy())
    assert all(other.shape == (0, 3) for other in others)
    for predictions, losses, _ in everywhere:
        assert np.array_equal(predictions, logits.argmax(1).double().numpy() + 1000)
        assert np.array_equal(losses, logits[:, 0].bfloat16().double().numpy())


def test_scores_that_differ_between_processes_are_named_and_rounding_is_not():
    results = {"eval_loss": 0.5, "eval_f1": np.nan}
    best_by, close = evaluation.BestBy("eval_loss", False, ("eval_f1",)), {"eval_loss": 0.500001, "eval_runtime": 2.0}
    assert not evaluation.differing_scores(best_by, results, [results, results | close])
    for other in ({}, results | {"eval_loss": 0.6}):
        assert f"on rank 0 and {other} on rank 2: " in evaluation.differing_scores(best_by, results, [results, other])


def test_losses_and_errors_are_better_when_lower():
    lower = ("loss", "eval_loss", "mean_squared_error", "mse", "perplexity", "smape", "brier_score")
    for name in (*lower, "eval_accuracy", "macro_f1", "pearson", "eval_spearmanr"):
        assert evaluation.greater_is_better(name) is (name not in lower)


def test_a_score_that_the_validation_data_leave_undefined_cannot_choose_the_best_model():
    computed = ("accuracy", "roc_auc"), {"roc_auc": "there is one class"}
    assert evaluation.best_by(Options(), *computed).name == "eval_accuracy"
    assert not evaluation.best_by(Options(metric_for_best_model="loss"), *computed).greater_is_better
    for name, why in {
        "roc_auc": "cannot tell which model is best: there is one class",
        "f1": "is not computed",
    }.items():
        with pytest.raises(UserError, match=f"--metric_for_best_model {name} {why}"):
            evaluation.best_by(Options(metric_for_best_model=name), *computed)
