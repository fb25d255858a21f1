"""Fixtures that more than one test file uses."""

import gc
import os
import sys
import time

import fork_server
import pytest
import runs
import torch
from accelerate import Accelerator
from hypothesis import settings

from shared.compat.of_accelerate import reset_state
from shared.report import page

sys.path.insert(0, str(runs.ROOT))  # for `benchmarks`
gc.disable()  # until the tests are collected: imports leave little garbage, and searching it takes a second per worker
settings.register_profile("without deadlines", deadline=None)  # timing never decides a test
settings.load_profile("without deadlines")
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")

# The slowest files, slowest first: a slow file that runs last leaves the other workers idle.
LONG = (
    *("launch/test_launch.py", "benchmarks/test_benchmarks.py"),
    *("recipes/test_exactness.py", "processes/test_preemption.py", "checkpoints/test_resuming.py"),
    *("launch/test_preflight.py", "benchmarks/test_scaling.py", "models/test_model_families.py"),
    *("launch/test_accelerate_configs.py", "images/test_image_models.py", "recipes/test_image_recipe.py"),
    *("speed/test_compiling.py", "metrics/test_foreign.py", "launch/test_kubernetes.py"),
    *("benchmarks/test_gpu_benchmarks.py", "recipes/test_existing_runs.py"),
    "predictions/test_onnx_export.py",
)


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_configure_node(node):
    """Start one fork server for all workers, in their controller."""
    fork_server.ensure_running(runs.environment_of_a_user(OMP_NUM_THREADS="1"))
    node.workerinput["fork_server"] = fork_server.address()


def pytest_configure(config):
    """Fork from the controller's server if this process is a worker."""
    if hasattr(config, "workerinput"):
        fork_server.use(config.workerinput["fork_server"])


def pytest_collection_modifyitems(items):
    """Run the files of LONG first; the others keep their order. Garbage collections skip the imported modules."""
    places = {f"tests/{file}": place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.location[0], len(LONG)))
    gc.freeze()
    gc.enable()


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def accelerator():
    """An Accelerator of a single process on the CPU, which keeps nothing for the next test."""
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.trackers.clear()
    accelerator.free_memory()


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """The flags of a small data set of real sentences."""
    return runs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def alone(texts, tmp_path_factory):
    """The output folder of a finished run of the NLP recipe, run in this process on one CPU."""
    output = tmp_path_factory.mktemp("alone") / "run"
    runs.train("nlp", output, *runs.TINY, *texts)
    return output


@pytest.fixture(scope="module", autouse=True)
def reset_process_state():
    """Reset the state of the process after each test file, because files share processes in no fixed order.

    Accelerate keeps its state, such as the precision, in class attributes. Benchmarks bind the process to a core.
    """
    names, cores, frozen = {*os.environ}, os.sched_getaffinity(0), gc.get_freeze_count()
    torch.set_num_threads(1)  # two test workers share a core; threads that wait for each other would waste it
    yield
    reset_state(processes=True)
    if gc.get_freeze_count() > frozen:  # objects that a test froze would never be collected
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    os.sched_setaffinity(0, cores)
    for name in {*os.environ} - names - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture
def fresh_accelerate_state(monkeypatch):
    """One process on a CPU. Accelerate's state is reset, because it lives in class attributes."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset_state(processes=True)
    yield
    reset_state(processes=True)


@pytest.fixture
def one_cpu_process_without_a_picture(monkeypatch):
    """The environment for a recipe that is called in this process: one CPU, and curves.png is not drawn."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(page, "draw_curves", lambda *_: None)


@pytest.fixture
def weights():
    """Tensors of three types, as of a model."""
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(8, 8, generator=generator),
        "layer.bias": torch.randn(8, generator=generator, dtype=torch.float64).bfloat16(),
        "batches": torch.tensor(7),
    }


@pytest.fixture
def own_cache(monkeypatch, tmp_path_factory):
    """An empty cache folder, which no other test uses, in a folder that no other test uses."""
    folder = tmp_path_factory.mktemp("own") / "cache"
    folder.mkdir()
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(folder))
    return folder


@pytest.fixture
def launched_by_nobody(monkeypatch):
    """The environment of a process that no launcher started."""
    for name in [*os.environ, *LAUNCHER]:
        if name in LAUNCHER or name.startswith(("ACCELERATE_MIXED", "ACCELERATE_USE", "ACCELERATE_GRAD", "FSDP_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
