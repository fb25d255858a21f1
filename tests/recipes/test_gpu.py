"""Tests that need a GPU; `make gpu-tests` runs them. docs/performance.md has the results on one H100.

No test here needs `evaluate` or `datasets`, which a GPU machine may lack. Processes are forked from one that imported
the packages (`runs.fork`), because a cold start takes 10 to 20 s on such a machine.
"""

import json
import os
import signal
import time

import pytest
import runs
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import recursively_apply
from runs import losses

from benchmarks.harness.host_waits import HostWaits
from shared.config import options
from shared.encoders.attention import flash_attention, padded_attention
from shared.metrics.task_metrics import TaskMetrics
from shared.report import page
from shared.speed.first_token import Documents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COMPILED = {"eager": [], "compiled": ["--torch_compile"]}
BF16 = ["--mixed_precision", "bf16"]
# Heads of a width that the attention kernels in half precision support.
TEXT = [*runs.TINY, "--hidden_size", "64", "--max_train_steps", "40", "--eval_steps", "40"]
IMAGES = [*runs.TINY_IMAGES, "--max_train_steps", "40", "--eval_steps", "40", "--cutmix", "1", "--color_jitter", "0.2"]


@pytest.fixture
def train(texts, tmp_path, monkeypatch):
    """A function that calls a recipe's main in this process, on the GPU, and returns its output folder."""
    monkeypatch.setattr(TaskMetrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
    monkeypatch.setattr(page, "draw_curves", lambda *_: None)

    def call(name, *flags, recipe="nlp", watch=None, change=lambda module: None):
        AcceleratorState._reset_state(reset_partial_state=True)
        module = runs.load_recipe(recipe)
        change(module)
        output = tmp_path / name
        data = IMAGES if recipe == "image_classification" else [*map(str, texts), *TEXT]
        config = options.parse(module.Config, [*data, "--output_dir", str(output), *map(str, flags)])
        if watch:
            with HostWaits(module, watch) as waits:
                module.main(config)
            assert len(waits.steps) == config.max_train_steps
            assert not waits.where
        else:
            module.main(config)
        return output

    yield call
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


RECIPES = ["nlp", "mlm", "image_classification"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_matches_full_precision_within_noise(train, recipe):
    full, half = (train(precision, "--mixed_precision", precision, recipe=recipe) for precision in ("no", "bf16"))
    assert losses(half) == pytest.approx(losses(full), rel=0.05)
    assert runs.training_lines(half)[-1]["samples"] == runs.training_lines(full)[-1]["samples"]
    assert torch.isfinite(runs.weights(half)).all()


@pytest.mark.parametrize("flags", [["--cudnn_benchmark"], ["--channels_last", "false"]])
def test_convolutions_of_another_kind_train_the_same(train, flags):
    usual, other = (train(*words, recipe="image_classification") for words in (["usual"], ["other", *flags]))
    assert losses(other) == pytest.approx(losses(usual), rel=0.05)


def noting(skipped):
    """A change of a recipe that appends to `skipped` whether each update was skipped."""

    def change(module):
        step = module.step_if_finite
        module.step_if_finite = lambda *args: skipped.append(done := step(*args)) or done

    return change


def skipping(skipped):
    """A change of a recipe that makes the gradient norm nan, which skips the update, where `skipped` is true."""

    def change(module):
        step, places = module.step_if_finite, iter(skipped)
        module.step_if_finite = lambda accelerator, optimizer, norm: step(
            accelerator, optimizer, torch.full_like(norm, torch.nan) if next(places) else norm
        )

    return change


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_matches_full_precision_with_the_same_updates_skipped(train, recipe, capsys):
    """The loss scale begins at 65,536. An update whose gradients overflow is skipped, and halves the scale."""
    flags = []
    half = train("half", "--mixed_precision", "fp16", recipe=recipe, change=noting(flags))
    printed = capsys.readouterr().out
    skipped = [bool(flag) for flag in flags]
    count = sum(skipped)
    assert len(skipped) == 40
    assert skipped == [True] * count + [False] * (40 - count), "updates are skipped only until the scale fits"
    assert count < 10
    assert runs.training_lines(half)[-1]["skipped_updates"] == count
    scale = f"{count} of 40 updates were skipped, because their gradients were not finite (loss scale at the end "
    assert (f"{scale}{65536 / 2**count:,.0f})" in printed) == (count > 0)
    full = train("full", "--mixed_precision", "no", recipe=recipe, change=skipping(skipped))
    assert losses(half) == pytest.approx(losses(full), rel=0.05)
    assert runs.training_lines(half)[-1]["samples"] == runs.training_lines(full)[-1]["samples"]
    assert torch.isfinite(runs.weights(half)).all()


def test_fp16_keeps_its_loss_scale_in_the_checkpoint(train):
    output = train("scaled", "--mixed_precision", "fp16", "--checkpointing_steps", "20")
    assert json.loads((output / "checkpoints/step_00000020/state.json").read_text())["scaler"]


@pytest.mark.parametrize(
    ("recipe", "precision", "workers"),
    [
        *((recipe, "bf16", workers) for recipe in RECIPES for workers in (0, 2)),
        *((recipe, precision, 0) for recipe in ("nlp", "mlm") for precision in ("fp16", "no")),
    ],
)
def test_no_step_makes_the_host_wait(train, recipe, precision, workers):
    flags = ["--trivial_augment"] if recipe == "image_classification" else []
    flags += ["--ema_decay", 0.9, "--mixed_precision", precision, "--dataloader_num_workers", workers]
    train("watched", *flags, recipe=recipe, watch="error")


def test_a_host_wait_is_found(train, monkeypatch):
    """Without this, the tests above could pass because nothing is counted."""
    load = runs.load_recipe

    def reading(name):
        module = load(name)
        clip = module.gradients.clip
        monkeypatch.setattr(module.gradients, "clip", lambda *args: (norm := clip(*args), norm.item())[0])
        return module

    monkeypatch.setattr(runs, "load_recipe", reading)
    with pytest.raises(AssertionError):
        train("watched", watch="warn")
    with pytest.raises(RuntimeError, match="synchronizing"):
        train("stopped", watch="error")


def test_batches_are_in_pinned_memory_with_and_without_workers(train, monkeypatch):
    from shared.plan import loading

    pinned, send = [], loading.send_to_device

    def sent(batch, *args, **kwargs):
        recursively_apply(lambda tensor: pinned.append(tensor.is_pinned()), batch)
        return send(batch, *args, **kwargs)

    monkeypatch.setattr(loading, "send_to_device", sent)
    in_process, in_workers = (train(str(n), "--dataloader_num_workers", n) for n in (0, 2))
    assert pinned
    assert all(pinned)
    assert losses(in_workers) == pytest.approx(losses(in_process), rel=1e-3)


def test_checkpoints_are_copied_into_pinned_memory(train, monkeypatch):
    from shared.checkpoints.staging import Staging

    found, copy = [], Staging.copy

    def copied(self, *args):
        done = copy(self, *args)
        places = [tensor for tensors in self.places.values() for tensor in tensors.values()]
        found.extend(tensor.is_pinned() for tensor in places if tensor.nbytes)
        return done

    monkeypatch.setattr(Staging, "copy", copied)
    train("pinned", "--checkpointing_steps", 10)
    assert found
    assert all(found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_run_has_the_losses_of_an_eager_one(train, recipe):
    eager, compiled = (train(name, *BF16, *flags, recipe=recipe) for name, flags in COMPILED.items())
    assert losses(compiled) == pytest.approx(losses(eager), rel=0.05)
    assert set(runs.load_file(compiled / "model/model.safetensors")) == set(
        runs.load_file(eager / "model/model.safetensors")
    )


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([60, 37, 12, 3, 1], None),
        ([64, 64], None),
        ([5], None),
        ([60, 37, 12, 3, 1], [1, 1, 1, 1, 1]),
        ([60, 37, 12, 3, 1], [9, 0, 12, 1, 0]),
        ([300, 200, 200], [130, 0, 60]),
    ],
)
def test_flash_attention_is_that_of_documents_padded_to_the_longest(lengths, queries, window):
    if queries and window:
        pytest.skip("FlashAttention does not know the places of some tokens")
    torch.manual_seed(0)
    heads, width = 4, 32
    total = sum(queries or lengths)
    q = torch.randn(1, heads, total, width, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, sum(lengths), width, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def documents(counts):
        ends = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
        return Documents(ends, max(counts))

    kwargs = {"documents": documents(lengths), "queries": documents(queries) if queries else None}
    results = []
    for attention in (flash_attention, padded_attention):
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        out, _ = attention(None, *parts, None, scaling=width**-0.5, sliding_window=window, **kwargs)
        out.float().square().sum().backward()
        results.append([out, *(part.grad for part in parts)])
    for ours, expected in zip(*results, strict=True):
        assert runs.distance(ours.float(), expected.float()) < 1e-2  # bf16 has 8 bits


def test_flash_attention_with_dropout_repeats_with_its_seed_and_keeps_the_mean():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, 400, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.ones_like(q).requires_grad_()  # so each output is the sum of the weights that are kept, times 1 / 0.9
    documents = Documents(torch.tensor([0, 150, 400], dtype=torch.int32, device="cuda"), 250)

    def attend(seed):
        torch.manual_seed(seed)
        return flash_attention(None, q, k, v, None, documents=documents, dropout=0.1)[0].float()

    out = attend(1)
    assert torch.equal(out, attend(1))
    assert not torch.equal(out, attend(2))
    assert 0.01 < out.std().item() < 0.5
    assert out.mean().item() == pytest.approx(1, abs=0.01)
    out.sum().backward()
    # Each weight that is kept counts 1 / 0.9 times in the gradient of its value.
    assert v.grad.float().mean().item() == pytest.approx(out.mean().item(), abs=0.01)


@pytest.mark.parametrize("kind", ["modernbert", "bert"])
def test_packed_texts_train_as_padded_rows_without_waiting(train, capsys, kind):
    flags = [*BF16, "--model_type", kind]
    padded = train("padded", *flags, "--no_packing")
    packed = train("packed", *flags, watch="error")
    assert "packed without padding, attention by FlashAttention" in capsys.readouterr().out
    assert losses(packed) == pytest.approx(losses(padded), rel=0.05)


@pytest.mark.parametrize("recipe", ["nlp", "image_classification"])
def test_with_deterministic_a_killed_and_resumed_run_is_bit_identical(texts, tmp_path, recipe):
    data = IMAGES if recipe == "image_classification" else [*texts, *TEXT]
    steps = 400
    flags = [*data, "--max_train_steps", steps, "--eval_steps", steps, "--deterministic", *BF16]
    flags += ["--checkpointing_steps", 20, "--logging_steps", 20]
    file = f"recipes/{recipe}.py"
    whole = runs.run_many(1, {"whole": flags}, tmp_path, file)["whole"]
    context = runs.begin_many(1, {"killed": flags}, tmp_path, file)
    (process,), output = context.processes, tmp_path / "killed-1"
    try:
        deadline = time.monotonic() + 90
        while not list(output.glob("checkpoints/step_????????/manifest.json")):  # complete: not step_*.partial
            assert process.is_alive(), (tmp_path / "output-1.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.is_alive(), "the run ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)  # with its loader's workers
    finally:
        process.kill()
        process.join()
    runs.run_many(1, {"killed": flags}, tmp_path, file)
    assert "resumed from" in (tmp_path / "output-1.txt").read_text()
    assert torch.equal(runs.weights(output), runs.weights(whole))
