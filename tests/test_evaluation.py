import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import evaluation
from shared.errors import UserError

ROOT = Path(__file__).parent.parent
KINDS = list(evaluation.DEFAULT_METRICS)


class World:
    """Processes as threads: each calls `reduce` once, and gets the sum of what all brought."""

    def __init__(self, size: int) -> None:
        self.size, self.brought, self.barrier = size, [], threading.Barrier(size, timeout=10)
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=self.reduce)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        self.brought.append(tensor)
        self.barrier.wait()
        return torch.stack(self.brought).sum(0)

    def gather(self, shares: list[list[int]], rows: torch.Tensor, total: int) -> list[Any]:
        """What `gather_rows` returns or raises on each process, when process i brings the samples shares[i]."""

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
    """A number of samples, and which process brings which of them in which order; some may bring none."""
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
def test_rows_come_back_exactly_and_in_dataset_order_on_every_process(
    division: tuple[int, list[list[int]]], dtype: torch.dtype, trailing: tuple[int, ...]
) -> None:
    total, shares = division
    rows = (torch.randn(total, *trailing, dtype=torch.float64) * 1e6).to(dtype)
    for gathered in World(len(shares)).gather(shares, rows, total):
        assert gathered.dtype == dtype
        assert torch.equal(gathered, rows)


@settings(max_examples=40, deadline=None)
@given(divided(), st.data())
def test_a_sample_that_comes_twice_or_never_is_an_error_on_every_process(
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


def test_a_loss_that_is_not_finite_stays_where_it_is() -> None:
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
    """One process of three real groups, of 3, 2 and 1: every size of data set that matters."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks; the files below do the work
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
            metrics = SimpleNamespace(compute=lambda p, r: [p.tolist(), r.tolist(), os.getpid()])
            cases.append([world, total, *evaluation.compute_on_main(accelerator, metrics, predictions, references)])
        if world > 1:
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    (folder / f"cases_{rank}.json").write_text(json.dumps(cases))


def test_real_groups_of_3_2_and_1_process_count_as_scikit_learn_does_for_every_size(tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score

    torch.multiprocessing.spawn(evaluate_in_group, args=(tmp_path,), nprocs=3)
    main, second, third = (json.loads((tmp_path / f"cases_{rank}.json").read_text()) for rank in range(3))
    sizes = [(world, total) for world in (3, 2, 1) for total in range(1, 2 * world * BATCH + 2)]
    assert [(world, total) for world, total, *_ in main] == sizes
    for _, total, predictions, references, _ in main:
        whole_predictions, whole_references = classified(total).T
        assert accuracy_score(references, predictions) == accuracy_score(whole_references, whole_predictions)
        assert (predictions, references) == (whole_predictions.tolist(), whole_references.tolist())
    assert len({pid for *_, pid in main}) == 1  # the main process computed each
    assert second == [case for case in main if case[0] >= 2]
    assert third == [case for case in main if case[0] >= 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_each_kind_are_computed_under_their_folders_names(kind: str) -> None:
    metrics = evaluation.resolve(kind, None, trust_remote_code=False, num_labels=3)
    true = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1]]) if kind == "multi_label" else np.array([0, 1, 2])
    ranked = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])  # the likeliest first
    values = metrics.compute(ranked if kind == "image_classification" else true, true)
    assert tuple(values) == evaluation.DEFAULT_METRICS[kind]
    perfect = {name: 0.0 if name == "mean_squared_error" else 1.0 for name in values}
    assert values == pytest.approx(perfect)
    assert metrics.main_name == evaluation.DEFAULT_METRICS[kind][0]


def test_float32_predictions_are_not_rounded_to_less() -> None:
    metrics = evaluation.resolve("regression", "mean_squared_error", trust_remote_code=False, num_labels=1)
    predictions = np.array([1.0000001, 3.0], dtype=np.float32)
    references = np.array([1.0, 3.0], dtype=np.float32)
    expected = float(np.mean((predictions.astype(np.float64) - references) ** 2))
    assert metrics.compute(predictions, references) == {"mean_squared_error": pytest.approx(expected, rel=1e-12, abs=0)}


def test_metric_name_alone_replaces_the_defaults() -> None:
    metrics = evaluation.resolve("classification", "macro_f1", trust_remote_code=False, num_labels=2)
    assert metrics.main_name == "macro_f1"
    assert set(metrics.compute(np.array([0, 1]), np.array([0, 1]))) == {"macro_f1"}


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("classification", "pearson", "does not fit classification: use one of accuracy, macro_f1"),
        ("regression", "accuracy", "does not fit regression: use one of pearson"),
        ("classification", "acuracy", "not one of accuracy, macro_f1, matthews_correlation"),
        ("classification", "f1", "add --trust_remote_code"),
        ("classification", "someone/metric", "add --trust_remote_code"),
        ("classification", "./missing", "no metric there"),
        ("classification", "missing.py", "no metric there"),
        ("classification", str(ROOT / "shared"), "no metric there"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_before_training(kind: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match="--metric_name") as refused:
        evaluation.resolve(kind, name, trust_remote_code=False, num_labels=2)
    assert says in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


OWN_METRIC = """
import datasets
import evaluate
from sklearn.metrics import f1_score


class Own(evaluate.Metric):
    def _info(self):
        value = datasets.Value("int64")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"binary_f1": f1_score(references, predictions)}
"""


@pytest.fixture
def own_metric(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text(OWN_METRIC)
    return tmp_path / "own"


@pytest.mark.parametrize("inside", ["", "own.py"])
def test_a_users_own_folder_or_file_serves_as_a_metric(own_metric: Path, inside: str) -> None:
    metrics = evaluation.resolve("classification", str(own_metric / inside), trust_remote_code=False, num_labels=2)
    assert metrics.main_name == "binary_f1"
    assert metrics.compute(np.array([0, 1, 1]), np.array([0, 1, 0])) == {"binary_f1": pytest.approx(2 / 3)}


def test_a_metric_that_fails_for_this_many_classes_is_refused_before_training(own_metric: Path) -> None:
    with pytest.raises(
        UserError, match="cannot be computed for classification with 5 labels: ValueError: Target is mul"
    ):
        evaluation.resolve("classification", str(own_metric), trust_remote_code=False, num_labels=5)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("import evaluate\n", "import evaluate\nfrom evaluate import Metric\n", "write `import evaluate`, not `from"),
        ("def _compute", "def _compute(", "SyntaxError"),
        ("f1_score(references, predictions)", "[0.5]", "TypeError"),
        ("import datasets\n", "import datasets\nimport no_such_package\n", "no_such_package"),
    ],
)
def test_a_broken_metric_of_the_user_is_refused_with_the_reason(
    own_metric: Path, old: str, new: str, says: str
) -> None:
    (own_metric / "own.py").write_text(OWN_METRIC.replace(old, new))
    with pytest.raises(UserError) as refused:
        evaluation.resolve("classification", str(own_metric), trust_remote_code=False, num_labels=2)
    assert str(own_metric) in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A Hub that can be reached or not, and the sources that evaluate.load was asked for."""
    import evaluate

    from shared import hub

    state = SimpleNamespace(reachable=True, loaded=[], cache=tmp_path / "modules")

    def require_hub(flag: str, value: str) -> None:
        if not state.reachable:
            raise UserError(f"{flag} {value}: the Hub cannot be reached")

    def load(source: str, **_: Any) -> Any:
        state.loaded.append(source)
        return SimpleNamespace(compute=lambda predictions, references: {"f1": 1.0})

    monkeypatch.setattr(hub, "require_hub", require_hub)
    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", state.cache)
    return state


def test_a_metric_of_the_hub_is_loaded_before_training(hub: SimpleNamespace) -> None:
    metrics = evaluation.resolve("classification", "f1", trust_remote_code=True, num_labels=2)
    assert hub.loaded == ["f1"]
    assert metrics.main_name == "f1"


def test_without_the_hub_the_error_names_the_flag_and_nothing_is_tried(hub: SimpleNamespace) -> None:
    hub.reachable = False
    with pytest.raises(UserError, match="--metric_name f1: the Hub cannot be reached"):
        evaluation.resolve("classification", "f1", trust_remote_code=True, num_labels=2)
    assert hub.loaded == []


@pytest.mark.parametrize(("name", "folder"), [("f1", "evaluate-metric--f1"), ("me/f1", "me--f1")])
def test_a_metric_fetched_earlier_needs_no_hub(hub: SimpleNamespace, name: str, folder: str) -> None:
    hub.reachable = False
    for age, digest in enumerate(["newest", "older"]):
        script = hub.cache / "evaluate_modules" / "metrics" / folder / digest / "f1.py"
        script.parent.mkdir(parents=True)
        script.touch()
        os.utime(script, (1e9 - age, 1e9 - age))
    evaluation.resolve("classification", name, trust_remote_code=True, num_labels=2)
    assert [Path(source).parent.name for source in hub.loaded] == ["newest"]


@pytest.mark.parametrize(
    ("name", "greater"),
    [
        *[("eval_accuracy", True), ("macro_f1", True), ("pearson", True), ("eval_spearmanr", True)],
        *[("loss", False), ("eval_loss", False), ("mean_squared_error", False), ("mse", False), ("perplexity", False)],
    ],
)
def test_losses_and_errors_are_better_when_lower(name: str, greater: bool) -> None:
    assert evaluation.greater_is_better(name) is greater


FRESH_PROCESS = """
import socket
import sys

def refuse(*_):
    raise OSError("no network")

socket.socket.connect = refuse
import numpy as np
from shared import evaluation

metrics = evaluation.resolve("classification", None, False, 2)
evaluation.resolve("multi_label", "micro_f1", False, 2)
slow = {"evaluate", "datasets", "sklearn"} & set(sys.modules)
assert not slow, slow

class WithoutTransformers:  # evaluate does without it, and starts seconds sooner
    def find_spec(self, name, *_):
        if name == "transformers":
            raise ImportError(name)

sys.meta_path.insert(0, WithoutTransformers())
print(metrics.compute(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])))
"""


def test_in_a_fresh_process_resolving_imports_nothing_slow_and_computing_needs_no_network_and_no_home(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "home")  # a path below a file cannot be created, not even by root
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": nowhere, "HF_HOME": nowhere, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'accuracy': 0.75" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # and no temporary files stay behind
