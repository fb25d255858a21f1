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
from resolved_metrics import resolve

from shared.config.options import Options
from shared.errors import UserError
from shared.monitoring import evaluation
from shared.plan.batches import MicroBatch

ROOT = Path(__file__).parents[2]
KINDS = list(evaluation.DEFAULT_METRICS)


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
            metrics = SimpleNamespace(compute=lambda p, r, _: [p.tolist(), r.tolist(), os.getpid()])
            cases.append([world, total, *evaluation.compute_on_main(accelerator, metrics, predictions, references)])
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_metrics_of_each_kind_are_named_after_their_folders(kind: str) -> None:
    metrics = resolve(kind, classes=10 if kind == "image_classification" else 3)
    true = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1]]) if kind == "multi_label" else np.array([0, 1, 2])
    ranked = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])  # the most likely class first
    values = metrics.compute(ranked if kind == "image_classification" else true, true)
    assert tuple(values) == evaluation.DEFAULT_METRICS[kind]
    perfect = {name: 0.0 if name == "mean_squared_error" else 1.0 for name in values}
    assert values == pytest.approx(perfect)
    assert metrics.main_name == evaluation.DEFAULT_METRICS[kind][0]


def test_float32_predictions_are_not_rounded() -> None:
    metrics = resolve("regression", "mean_squared_error", classes=0)
    predictions = np.array([1.0000001, 3.0], dtype=np.float32)
    references = np.array([1.0, 3.0], dtype=np.float32)
    expected = float(np.mean((predictions.astype(np.float64) - references) ** 2))
    assert metrics.compute(predictions, references) == {"mean_squared_error": pytest.approx(expected, rel=1e-12, abs=0)}


def test_metric_name_replaces_the_defaults() -> None:
    metrics = resolve("classification", "macro_f1")
    assert metrics.main_name == "macro_f1"
    assert set(metrics.compute(np.array([0, 1]), np.array([0, 1]))) == {"macro_f1"}


def scored(kind: str, *names: str, classes: int = 3, rows: int = 60, **settings: Any) -> tuple[Any, ...]:
    """(values of the metrics `names`, probabilities, predictions, targets) for random logits."""
    random = np.random.default_rng(classes)
    logits = torch.from_numpy(random.normal(size=(rows, classes)).astype(np.float32))
    several = kind == "multi_label"
    true = random.integers(0, 2, (rows, classes)) if several else random.integers(0, classes, rows)
    predicted = (logits > 0).long().numpy() if several else logits.argmax(1).numpy()
    metrics = resolve(kind, *names, classes=classes, targets=true, **settings)
    scores = metrics.probabilities(logits).numpy()
    return metrics.compute(predicted, true, scores), scores, predicted, true


def test_several_metrics_equal_those_of_scikit_learn_and_the_first_is_the_main_one() -> None:
    from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score, roc_auc_score

    names = ("f1_of_class", "accuracy", "roc_auc", "recall_of_class", "precision_of_class")
    values, scores, predicted, true = scored("classification", *names, classes=2)
    of_class = {"f1": f1_score, "recall": recall_score, "precision": precision_score}
    expected = {"accuracy": accuracy_score(true, predicted), "roc_auc": roc_auc_score(true, scores[:, 1])}
    expected |= {f"{name}_of_class": compute(true, predicted) for name, compute in of_class.items()}
    assert values == pytest.approx(expected, abs=1e-12)
    assert tuple(values) == names
    assert resolve("classification", *names).main_name == "f1_of_class"

    values, scores, predicted, true = scored("classification", *names, positive_label="a")
    expected = {"accuracy": accuracy_score(true, predicted), "roc_auc": roc_auc_score(true, scores, multi_class="ovr")}
    expected |= {f"{name}_of_class": compute(true == 0, predicted == 0) for name, compute in of_class.items()}
    assert values == pytest.approx(expected, abs=1e-6)

    values, scores, predicted, true = scored("multi_label", *names, positive_label="c")
    expected = {"accuracy": accuracy_score(true, predicted), "roc_auc": roc_auc_score(true, scores, average="macro")}
    expected |= {f"{name}_of_class": compute(true[:, 2], predicted[:, 2]) for name, compute in of_class.items()}
    assert values == pytest.approx(expected, abs=1e-12)


def test_metrics_of_images_use_the_most_likely_class_and_the_probabilities() -> None:
    metrics = resolve("image_classification", "recall_of_class", "roc_auc", "top_5_accuracy", classes=6, **POSITIVE_B)
    true, scores = np.array([0, 1, 2, 3, 4, 5]), np.eye(6, dtype=np.float32)
    ranked = np.array([[0, 1, 2, 3, 4], [2, 1, 0, 3, 4], [2, 0, 1, 3, 4], [3, 0, 1, 2, 4], [4, 0, 1, 2, 3]])
    ranked = np.vstack([ranked, [[0, 1, 2, 3, 4]]])
    expected = {"recall_of_class": 0.0, "roc_auc": 1.0, "top_5_accuracy": pytest.approx(5 / 6)}
    assert metrics.compute(ranked, true, scores) == expected


POSITIVE_B = {"positive_label": "b"}


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        (
            ["f1_of_class"],
            {"classes": 3},
            "--metric_name f1_of_class needs --positive_label, the class to compute it fo",
        ),
        (["f1_of_class"], {"kind": "multi_label"}, "needs --positive_label, the class to compute it for: a, b"),
        (["f1_of_class"], {"positive_label": "x"}, "--positive_label x is not a class of the data: use one of a, b"),
        (["accuracy"], POSITIVE_B, "--positive_label b has no effect: no metric of --metric_name accuracy needs it"),
        (["accuracy", "accuracy"], {}, "--metric_name accuracy accuracy: accuracy would be computed twice"),
        (["roc_auc"], {"kind": "regression"}, "--metric_name roc_auc does not fit regression: use one of pearson"),
        (["top_5_accuracy"], {"kind": "image_classification", "classes": 5}, "is always 1 for a model of 5 classes"),
    ],
)
def test_metrics_that_do_not_fit_the_task_or_the_flags_are_refused(
    names: list[str], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as refused:
        resolve(settings.pop("kind", "classification"), *names, **settings)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_path_of_a_shipped_metric_selects_that_metric() -> None:
    named, path = "f1_of_class", str(ROOT / "shared/monitoring/metrics/f1_of_class")
    for one in (path, f"{path}/f1_of_class.py"):
        assert resolve("classification", one, **POSITIVE_B) == resolve("classification", named, **POSITIVE_B)


NO_AUC = "roc_auc cannot be computed (NaN): each row of the validation data has the same"
LEFT_OUT = "roc_auc is the mean over 2 of 3 classes: the others are in none or all rows of the validation data (c)"


def test_top_5_accuracy_needs_more_than_five_classes() -> None:
    assert resolve("image_classification", classes=5).names == ("accuracy", "macro_f1")
    assert resolve("image_classification", classes=6).names == ("accuracy", "top_5_accuracy", "macro_f1")


@pytest.mark.parametrize(
    ("kind", "classes", "targets", "expected", "note"),
    [
        ("classification", 2, [0, 0, 0, 0], "nan", f"{NO_AUC} class"),
        ("multi_label", 2, [[0, 1]] * 4, "nan", f"{NO_AUC} labels"),
        ("classification", 3, [0, 0, 1, 1], 1.0, LEFT_OUT),
        ("classification", 2, [0, 1, 0, 1], 1.0, ""),
    ],
)
def test_metrics_that_the_validation_data_cannot_give_are_noted_before_training(
    kind: str, classes: int, targets: Any, expected: float, note: str
) -> None:
    metrics = resolve(kind, "roc_auc", "f1_of_class", classes=classes, targets=targets, **POSITIVE_B)
    true = np.array(targets)
    scores = (true if kind == "multi_label" else np.eye(classes)[true]).astype(np.float32)
    values = metrics.compute(true, true, scores)
    assert values["roc_auc"] == pytest.approx(float(expected), nan_ok=True)
    found = metrics.notes.get("note on --metric_name", "")
    assert found == note
    lacks_b = kind == "classification" and 1 not in targets
    assert ("note on --positive_label" in metrics.notes) == lacks_b
    assert set(metrics.empty) == ({"roc_auc"} if expected == "nan" else set()) | ({"f1_of_class"} if lacks_b else set())
    for name in metrics.empty:
        with pytest.raises(UserError, match=f"--metric_for_best_model {name} cannot tell which model is best: "):
            evaluation.best_by(Options(metric_for_best_model=name), metrics)


def test_probabilities_that_are_not_finite_have_no_roc_auc() -> None:
    metrics = resolve("classification", "roc_auc")
    scores = np.array([[0.5, np.nan], [0.5, 0.5]], np.float32)
    assert np.isnan(metrics.compute(np.array([0, 1]), np.array([0, 1]), scores)["roc_auc"])


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_and_probabilities_of_all_processes_are_gathered_in_pieces_in_dataset_order(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "NUMBERS_AT_ONCE", 4 * 3)  # four samples with probabilities, six without
    total = 10
    metrics = resolve("classification", "roc_auc", classes=3)
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

        main = SimpleNamespace(device=torch.device("cpu"), reduce=reduce, is_main_process=rank == 0)
        rows = evaluation.Rows((total,), metrics)
        for counted in (True, False):  # a repeat that is not counted changes nothing
            mine = logits[shares[rank]]
            rows.add(MicroBatch(0, 0, shares[rank], shares[rank], total, counted), mine.argmax(1), mine[:, 0], mine)
        return rows.gather(main), rows.gather_scores(main)

    with ThreadPoolExecutor(world) as pool:
        everywhere, (first, *others) = zip(*pool.map(process, range(world)), strict=True)
    assert first.dtype == np.float32
    assert np.array_equal(first, logits.softmax(1).numpy())
    assert others == [None] * (world - 1)
    for predictions, losses in everywhere:
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
