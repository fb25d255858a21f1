"""Compressed gradients have half the bytes and are synchronized once per step, as a profile of the recipe shows."""

import json
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import runs
import torch

from shared.extras import costs, gradient_compression
from shared.options.data_options import ExtraOptions

STEPS = 3


@pytest.fixture(scope="module")
def launched(texts, tmp_path_factory):
    """The recipe on two processes, uncompressed and in bf16 and fp16, each with a profile of three steps."""
    folder = tmp_path_factory.mktemp("compression")
    flags = [*runs.TINY, *texts, "--profile", STEPS, "--checkpointing_steps", "no", "--max_tokens_per_micro_batch", 60]
    flags += ["--logging_steps", 8]  # logging makes a collective call, too
    formats = ("none", "bf16", "fp16")
    outputs = runs.run_many(2, {name: [*flags, "--gradient_compression", name] for name in formats}, folder)
    assert re.findall(r"sent and summed in (\w+)", (folder / "output-2.txt").read_text()) == ["bf16", "fp16"]
    return outputs


def trace(output, rank):
    return json.loads((output / f"profile/trace-{rank}.json").read_text())["traceEvents"]


@pytest.mark.parametrize("compressed", ["none", "bf16", "fp16"])
def test_gradients_are_sent_once_per_step_for_any_number_of_micro_batches(launched, compressed):
    for rank in range(2):
        calls = Counter(event.get("name") for event in trace(launched[compressed], rank))
        assert calls["DistributedDataParallel.forward"] >= 2 * STEPS, "a step must have several micro-batches"
        # One for the gradients, because the model fits in one bucket, and one to agree on signals.
        assert calls["c10d::allreduce_"] == 2 * STEPS


def test_compression_changes_the_weights_only_by_rounding(launched):
    for compressed, most in (("bf16", 2e-2), ("fp16", 2e-3)):
        assert 0 < runs.distance(runs.weights(launched[compressed]), runs.weights(launched["none"])) < most


def test_a_profile_has_a_trace_and_a_table_per_process(launched):
    folder = launched["none"] / "profile"
    expected = [f"{what}-{rank}.{kind}" for what, kind in (("operators", "txt"), ("trace", "json")) for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    table = (folder / "operators-1.txt").read_text().splitlines()
    _, header, rows = [i for i, line in enumerate(table) if line.startswith("----")]
    assert rows - header - 1 == costs.MOST_EXPENSIVE


def test_the_hook_sends_half_the_bytes_and_returns_the_mean_of_a_sum_that_would_overflow_in_place(monkeypatch):
    """Two processes have the same gradient."""
    sent, gradient = [], torch.tensor([60000.0, 0.1])

    def all_reduce(tensor, async_op):
        sent.append(tensor.clone())
        tensor.mul_(2)
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    expected = gradient.half().float()
    bucket = SimpleNamespace(buffer=lambda: gradient)
    result = gradient_compression.average(torch.float16, bucket).wait()
    assert sent[0].element_size() == 2
    assert result is gradient
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=0)


def test_a_run_that_is_shorter_than_its_profile_writes_a_shorter_profile_and_a_message(tmp_path, capsys):
    accelerator = SimpleNamespace(process_index=0, device=torch.device("cpu"), print=print)
    config, monitor = ExtraOptions(profile=5, output_dir=str(tmp_path)), SimpleNamespace(timed=lambda _: nullcontext())
    profiler = costs.Profiler()
    profiler.begun(SimpleNamespace(accelerator=accelerator, config=config, monitor=monitor))
    for _ in range(costs.WARMUP + 2):
        torch.ones(3) + 1
        profiler.step_ended()
    profiler.closed()
    profiler.closed()
    assert "--profile: the run ended before the profile, after 4 steps" in capsys.readouterr().out
    assert (tmp_path / "profile/trace-0.json").stat().st_size > 0
    assert "aten::add" in (tmp_path / "profile/operators-0.txt").read_text()
