"""A sharded model with two optimizers is saved in parts, over gloo, and read by another number of processes."""

import json

import pytest
import runs
import torch
from torch import nn

from shared.checkpoints import resuming, saving
from shared.checkpoints.progress import Progress
from shared.config.options import Options
from shared.fsdp.strategy import ShardedSaver
from shared.models.optimizers import ChainedOptimizers
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)


def build(accelerator, shard):
    """A model and its optimizer, registered in `accelerator` as `prepare` does it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))  # 33 rows: uneven shards
    if shard:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (accelerator.num_processes,))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
    optimizers = (
        make_optimizer(model[0], Options(learning_rate=0.01)),
        torch.optim.SGD(model[2].parameters(), 0.01, 0.9),
    )
    optimizer = ChainedOptimizers(optimizers)
    accelerator._models[:], accelerator._optimizers[:] = [model], [optimizer]
    return model, optimizer


def train(model, optimizer, steps):
    """Train on the same data on every process, so that the number of processes does not matter; return the weights."""
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(6, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for p in model.parameters()]


def save_on_two(accelerator, folder):
    from torch.distributed import checkpoint

    saving.SECONDS_BETWEEN = 0.0
    model, optimizer = build(accelerator, shard=True)
    config = Options(output_dir=str(folder), save_total_limit=1)
    saver = ShardedSaver(accelerator, config, PLAN)
    results = {}
    for step in (2, 4):
        train(model, optimizer, range(step - 2, step))
        saver.save(Progress(step=step), {})
    results["committed"] = sorted(resuming.checkpoints_of(folder))
    real = checkpoint.FileSystemWriter.write_data

    def full(*args):
        if accelerator.process_index == 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    checkpoint.FileSystemWriter.write_data = full
    saver.save(Progress(step=6), {})
    results["problem"] = saver.problem
    results["refused"] = runs.problem_of(saver.finish)
    checkpoint.FileSystemWriter.write_data = real
    results["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    results["weights"] = train(model, optimizer, range(4, 8))
    saver.load(folder / "checkpoints/step_00000004")
    results["again"] = train(model, optimizer, range(4, 8))
    return results


def resume(accelerator, folder):
    model, optimizer = build(accelerator, shard=True)
    train(model, optimizer, range(40, 41))
    config = Options(output_dir=str(folder))
    path, state = resuming.find(accelerator, config)
    saver = ShardedSaver(accelerator, config, PLAN)
    refusal = runs.problem_of(saver.load, folder)
    saver.load(path)
    return {"not sharded": refusal, "step": state["step"], "weights": train(model, optimizer, range(4, 8))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, runs.in_group(save_on_two, 2, folder)


def test_each_process_writes_its_part_and_the_manifest_lists_all_parts(saved):
    folder, results = saved
    checkpoint = folder / "checkpoints/step_00000004"
    assert [each["committed"] for each in results] == [[4], [4]]
    files = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
    assert set(json.loads((checkpoint / "manifest.json").read_text())) == files - {"manifest.json"}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {f"{part}/.metadata", f"{part}/__0_0.distcp", f"{part}/__1_0.distcp"} <= files
    assert "state.json" in files
    assert resuming.problem_with(checkpoint) is None


def test_a_save_that_fails_on_one_process_fails_on_all_and_leaves_no_file(saved):
    for each in saved[1]:
        assert "[Errno 28] process 1: No space left on device" in each["problem"]
        assert "[Errno 28] process 1: No space left on device" in each["refused"]
        assert each["left"] == ["step_00000004"]


def test_the_same_number_of_processes_resumes_bit_by_bit(saved):
    for each in saved[1]:
        assert each["weights"] == each["again"]


def test_a_different_number_of_processes_resumes_to_rounding(saved):
    folder, results = saved
    expected = torch.cat([torch.tensor(p).flatten() for p in results[0]["weights"]]).double()
    for each in runs.in_group(resume, 3, folder):
        assert each["step"] == 4
        assert "was saved without FSDP and cannot be resumed with it" in each["not sharded"]
        weights = torch.cat([torch.tensor(p).flatten() for p in each["weights"]]).double()
        assert runs.distance(weights, expected) < 1e-6
