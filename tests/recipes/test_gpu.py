"""Tests that need a GPU; `make gpu-tests` runs them. docs/performance.md has the results on one H100.

No test here needs `evaluate` or `datasets`, which a GPU machine may lack. Processes are forked from one that imported
the packages (`runs.fork`), because a cold start takes 10 to 20 s on such a machine.
"""

import pytest
import runs
import torch
from accelerate.state import AcceleratorState, PartialState
from runs import losses

from benchmarks.harness.host_waits import HostWaits
from shared.config import options
from shared.encoders import packing
from shared.extras import curves
from shared.metrics.task_metrics import TaskMetrics
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
    monkeypatch.setattr(curves, "draw_curves", lambda *_: None)

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


def at_each_update(noted, skipped=()):
    """A change of a recipe that notes whether each update was skipped, and skips those where `skipped` is true.

    A gradient norm of nan skips an update.
    """

    def change(module):
        step, places = module.step_if_finite, iter(skipped)

        def noting(accelerator, optimizer, norm):
            noted.append(step(accelerator, optimizer, norm * torch.nan if next(places, False) else norm))
            return noted[-1]

        module.step_if_finite = noting

    return change


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_matches_full_precision_with_the_same_updates_skipped(train, recipe, capsys):
    """The loss scale begins at 65,536. An update whose gradients overflow is skipped, and halves the scale."""
    flags = []
    half = train("half", "--mixed_precision", "fp16", recipe=recipe, change=at_each_update(flags))
    printed = capsys.readouterr().out
    skipped = [bool(flag) for flag in flags]
    count = sum(skipped)
    assert len(skipped) == 40
    assert skipped == [True] * count + [False] * (40 - count), "updates are skipped only until the scale fits"
    assert count < 10
    assert runs.training_lines(half)[-1]["skipped_updates"] == count
    scale = f"{count} of 40 updates were skipped, because their gradients were not finite (loss scale at the end "
    assert (f"{scale}{65536 / 2**count:,.0f})" in printed) == (count > 0)
    full = train("full", "--mixed_precision", "no", recipe=recipe, change=at_each_update([], skipped))
    assert losses(half) == pytest.approx(losses(full), rel=0.05)
    assert runs.training_lines(half)[-1]["samples"] == runs.training_lines(full)[-1]["samples"]
    assert torch.isfinite(runs.weights(half)).all()


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
    for attention in (packing.flash_attention, packing.padded_attention):
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        out, _ = attention(None, *parts, None, scaling=width**-0.5, sliding_window=window, **kwargs)
        out.float().square().sum().backward()
        results.append([out, *(part.grad for part in parts)])
    for ours, expected in zip(*results, strict=True):
        assert runs.distance(ours.float(), expected.float()) < 1e-2  # bf16 has 8 bits


@pytest.mark.parametrize("kind", ["modernbert", "bert"])
def test_packed_texts_train_as_padded_rows_without_waiting(train, capsys, kind):
    flags = [*BF16, "--model_type", kind]
    padded = train("padded", *flags, "--no_packing")
    packed = train("packed", *flags, watch="error")
    assert "packed without padding, attention by FlashAttention" in capsys.readouterr().out
    assert losses(packed) == pytest.approx(losses(padded), rel=0.05)


@pytest.mark.parametrize("recipe", ["nlp", "image_classification"])
def test_with_deterministic_a_resumed_run_is_bit_identical(texts, tmp_path, recipe):
    data, file = IMAGES if recipe == "image_classification" else [*texts, *TEXT], f"recipes/{recipe}.py"
    flags = [*data, "--deterministic", *BF16, "--checkpointing_steps", 20]
    whole = runs.run_many(1, {"whole": flags}, tmp_path, file)["whole"]
    flags += ["--resume_from_checkpoint", whole / "checkpoints/step_00000020"]
    resumed = runs.run_many(1, {"resumed": flags}, tmp_path, file)["resumed"]
    assert torch.equal(runs.weights(resumed), runs.weights(whole))
