"""Tests of FSDP and of several processes that need a GPU; `make gpu-distributed` runs them.

Most need one GPU, whose processes share it over gloo. See test_gpu.py for what these tests may import.
"""

import shutil

import pytest
import runs
import torch
from runs import losses

from benchmarks.harness.launching import python_path
from shared.processes import rules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ENVIRONMENT = {"PYTHONPATH": python_path()}  # of a launcher: the repository may not be installed on a GPU machine
BF16 = ["--mixed_precision", "bf16"]
# Heads of a width that the attention kernels in half precision support.
TEXT = [*runs.TINY, "--hidden_size", "64", "--max_train_steps", "40", "--eval_steps", "40"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("recipe", ["nlp", "mlm", "image_classification"])
def test_fsdp_yaml_trains_evaluates_and_saves(texts, tmp_path, recipe, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    images = [*runs.TINY_IMAGES, "--optim", "adamw"]
    data = images if recipe == "image_classification" else [*texts, *runs.TINY]
    launch = runs.accelerate_launch("fsdp", f"recipes/{recipe}.py", *data, flags=["--num_processes", str(processes)])
    runs.succeed([*launch, "--output_dir", tmp_path / "fsdp"], **ENVIRONMENT)
    assert torch.isfinite(runs.weights(tmp_path / "fsdp")).all()


def synchronized_norm(rank, world, folder):
    """One step of SyncBatchNorm over gloo: each process has a share of the batch, all on one GPU."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).double().cuda()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if world > 1 else model
    batch = torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(1)).double().cuda()
    mine = batch.tensor_split(world)[rank]
    model(mine).square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
    torch.distributed.all_reduce(gradients)
    if rank == 0:
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        torch.save({"gradients": gradients, **state}, folder / f"{world}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_synchronized_batch_norm_on_two_processes_equals_batch_norm_of_the_whole_batch(tmp_path):
    for world in (1, 2):
        (tmp_path / "store").unlink(missing_ok=True)
        runs.fork(synchronized_norm, (world, tmp_path), world)
    one, two = (torch.load(tmp_path / f"{world}.pt", weights_only=True) for world in (1, 2))
    for name, expected in one.items():
        assert torch.allclose(two[name].double(), expected.double(), rtol=1e-9, atol=1e-9), name


@pytest.fixture(scope="module", params=["nlp", "mlm", "image_classification"])
def shared_gpu(request, texts, tmp_path_factory):
    """The folders of runs on one process and on two that share a GPU over gloo, and the output of the two.

    The micro-batches of a step differ in size, and the processes have different numbers of them.
    """
    recipe, folder = request.param, tmp_path_factory.mktemp("shared_gpu")
    data = [*runs.TINY_IMAGES, "--global_batch_size", 36] if recipe == "image_classification" else [*texts, *runs.TINY]
    plain = [*data, "--checkpointing_steps", 4, "--eval_steps", 4, "--mixed_precision", "no"]
    # With bf16, packed documents use FlashAttention.
    other = BF16 if recipe == "mlm" else ["--gradient_compression", "bf16"]
    jobs = {"plain": plain, "in bf16": [*plain, *other]}
    file = f"recipes/{recipe}.py"
    found = {"alone": runs.run_many(1, jobs, folder, file)}
    found["together"] = runs.run_many(2, jobs, folder, file, **{rules.SHARE_GPU: "1"})
    printed = (folder / "output-2.txt").read_text()
    shutil.copytree(found["together"]["plain"], folder / "resumed-2")
    shutil.rmtree(folder / "resumed-2/checkpoints/step_00000008")
    shutil.rmtree(folder / "resumed-2/model")
    runs.run_many(2, {"resumed": plain}, folder, file, **{rules.SHARE_GPU: "1"})
    assert "resumed from step_00000004" in (folder / "output-2.txt").read_text()
    return found | {"printed": printed, "resumed": folder / "resumed-2"}


def test_two_processes_on_one_gpu_give_the_run_of_one_process(shared_gpu):
    assert "DDP over gloo" in shared_gpu["printed"]
    for name, bound in (("plain", 1e-4), ("in bf16", 0.05)):
        one, two = (shared_gpu[where][name] for where in ("alone", "together"))
        assert [line["samples"] for line in runs.training_lines(two)] == [
            line["samples"] for line in runs.training_lines(one)
        ]
        assert losses(two) == pytest.approx(losses(one), rel=bound), name
        assert runs.distance(runs.weights_that_learn(two), runs.weights_that_learn(one)) < bound, name
        scores = [[line for line in runs.metrics(run) if "eval_loss" in line] for run in (one, two)]
        assert [line["eval_loss"] for line in scores[1]] == pytest.approx(
            [line["eval_loss"] for line in scores[0]], rel=bound
        )


def test_two_processes_on_one_gpu_resume_from_their_checkpoint(shared_gpu):
    whole, resumed = shared_gpu["together"]["plain"], shared_gpu["resumed"]
    assert runs.training_lines(resumed)[-1]["samples"] == runs.training_lines(whole)[-1]["samples"]
    assert losses(resumed)[-1] == pytest.approx(losses(whole)[-1], rel=1e-4)
    assert runs.distance(runs.weights_that_learn(resumed), runs.weights_that_learn(whole)) < 1e-4


@pytest.mark.parametrize("processes", [1, 2])
def test_nccl_trains(texts, tmp_path, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    environment = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port())}
    found = runs.run_many(processes, {"run": [*texts, *TEXT, *BF16]}, tmp_path, **environment)
    assert torch.isfinite(runs.weights(found["run"])).all()
    assert processes == 1 or "over nccl" in (tmp_path / f"output-{processes}.txt").read_text()
