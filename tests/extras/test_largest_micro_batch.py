"""Out of memory on one process ends all processes with a one-line error; the search for a budget changes no state."""

import re
import textwrap
import time
from dataclasses import dataclass

import numpy as np
import pytest
import runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.checkpoints import resuming
from shared.errors import UserError
from shared.extras import largest_micro_batch
from shared.extras.largest_micro_batch import (
    LargestMicroBatch,
    apply_largest_budget,
    largest,
    longest_samples,
    succeeds,
)
from shared.options.extra_options import ExtraOptions
from shared.options.image_options import ImageOptions
from shared.plan import loading
from shared.plan.batches import Plan
from shared.processes import starting
from shared.run import command

HOST = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=50), st.integers(1, 60))
def test_the_longest_samples_are_found_block_by_block(lengths, count):
    plan = Plan(lengths=np.array(lengths), seed=0, global_batch_size=1, num_epochs=1)
    expected = np.argsort(-np.array(lengths), kind="stable")[:count].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest_micro_batch, "BLOCK", 7)
        assert longest_samples(plan, count).tolist() == expected


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True),
        (RuntimeError(HOST), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory."), False),
    ],
)
def test_what_counts_as_out_of_memory(error, yes):
    assert command.ran_out(error) is yes


@dataclass(frozen=True, kw_only=True)
class TokenOptions(ExtraOptions):
    max_tokens_per_micro_batch: int | None = 96


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (TokenOptions(), "lower --max_tokens_per_micro_batch 96; if"),
        (ExtraOptions(per_device_train_batch_size=8), "lower --per_device_train_batch_size 8; if"),
        (
            TokenOptions(per_device_train_batch_size=8),
            "lower --max_tokens_per_micro_batch 96 or --per_device_train_batch_size 8; if",
        ),
        (ExtraOptions(), "set --per_device_train_batch_size; if"),
    ],
)
def test_the_advice_names_the_shape_and_the_flag(config, fix, monkeypatch):
    monkeypatch.setattr(loading.current_batch, "batch", None)
    assert "before the first micro-batch" in command.advice(config)
    loading.current_batch.note({"labels": torch.zeros(7), "input_ids": torch.zeros(7, 24)})
    assert "ran out of memory on a micro-batch of 7 x 24: " + fix in command.advice(config)
    loading.current_batch.note((torch.zeros(5, 2), torch.zeros(5)))
    assert loading.current_batch.shape == "5 x 2"
    loading.current_batch.note(torch.zeros(4, 3))
    assert loading.current_batch.shape == "4 x 3"
    loading.current_batch.note(["text", 7])
    assert loading.current_batch.shape == ""


@given(most=st.integers(1, 5000), limit=st.integers(1, 6000))
def test_the_search_finds_the_largest_fitting_budget_in_few_trials(most, limit):
    tried = []
    assert largest(most, lambda n: tried.append(n) or n <= limit) == min(most, limit)
    assert len(tried) <= 2 * most.bit_length()
    assert all(1 <= n <= most for n in tried)
    assert sum(n > limit for n in tried) <= most.bit_length()


@pytest.mark.parametrize(
    ("on_cpu", "environment", "reason"), [(True, "false", "no fixed memory limit"), (False, "true", "under FSDP")]
)
def test_the_search_is_refused_on_a_cpu_and_under_fsdp(monkeypatch, on_cpu, environment, reason):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", environment)
    if not on_cpu:
        monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match=f"--auto_micro_batch needs GPUs and DDP .*{reason}.*set the budget"):
        starting.check_environment(ExtraOptions(auto_micro_batch=True), on_cpu)


def test_the_search_is_refused_with_synchronized_batch_norm(monkeypatch):
    config = ImageOptions(auto_micro_batch=True, sync_batchnorm=True)
    with pytest.raises(UserError, match=r"--auto_micro_batch does not work with --sync_batchnorm .*leave one of them"):
        starting.check_environment(config, on_cpu=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    starting.check_environment(ImageOptions(auto_micro_batch=True), on_cpu=False)


def test_the_first_launch_searches_and_a_resumed_run_keeps_the_found_budget():
    searching = LargestMicroBatch().settings(ExtraOptions(auto_micro_batch=True, per_device_train_batch_size=4), None)
    assert searching.per_device_train_batch_size is None
    kept = LargestMicroBatch().settings(ExtraOptions(auto_micro_batch=True), {"per_device_train_batch_size": 12})
    assert kept.per_device_train_batch_size == 12
    plain = ExtraOptions(per_device_train_batch_size=4)
    assert (
        LargestMicroBatch().settings(plain, {"per_device_train_batch_size": 12}) is plain
    )  # and is refused later as a changed setting


# The search, on two processes, one of which has less memory


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))

    def forward(self, x):
        return self.body(x)


def search(accelerator, folder):
    """Search with simulated limits on the rows that fit; return budgets, trials and whether state is as before."""
    from shared.optimization.optimizers import make_optimizer

    rank, found = accelerator.process_index, {}
    lengths = np.array([5, 9, 30, 7] * 10)
    for name, limits in {"all fit": (99, 99), "one has less": (99, 13), "none": (0, 99)}.items():
        torch.manual_seed(3)
        model = Net()
        config = TokenOptions(auto_micro_batch=True, global_batch_size=24)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, config))
        plan = Plan.of_run(config, accelerator, lengths=lengths)
        before = [value.clone() for value in model.state_dict().values()]
        state, tried = torch.get_rng_state(), []

        def compute_loss(micro_batch, model=model, limit=limits[rank], tried=tried):
            tried.append(len(micro_batch.samples))
            assert lengths[micro_batch.samples].max() == 30
            loss = model(torch.randn(max(2, tried[-1]), 3)).sum()
            if tried[-1] > limit:
                raise RuntimeError(HOST)
            return loss

        try:
            changed = apply_largest_budget(accelerator, config, plan, model, optimizer, compute_loss)
            assert plan.max_tokens == changed.max_tokens_per_micro_batch
            assert changed.global_batch_size == plan.global_batch_size == 24
            found[name] = plan.max_tokens
        except UserError as error:
            found[name] = str(error)
        found[f"{name}, tried"] = tried
        now = model.state_dict().values()
        found[f"{name}, as before"] = [
            all(torch.equal(a, b) for a, b in zip(before, now, strict=True)),
            torch.equal(torch.get_rng_state(), state),
            len(optimizer.optimizer.state) == 0,
            all(p.grad is None for p in model.parameters()),
        ]
        del model, optimizer, compute_loss
    return found


def test_processes_agree_on_a_budget_that_fits_on_each_and_no_state_changes(tmp_path, monkeypatch):
    zero, one = runs.in_group(search, 2, tmp_path)
    assert zero == one
    assert zero["all fit"] == 24 * 30  # the whole global batch, which is the largest possible budget
    assert zero["one has less"] == (13 - 2) * 30  # an eighth, rounded up, is kept free
    assert "--auto_micro_batch: the longest sample, of length 30, does not fit into memory" in zero["none"]
    for name in ("all fit", "one has less", "none"):
        assert zero[f"{name}, as before"] == [True] * 4, name


def test_a_trial_raises_errors_that_are_not_out_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        succeeds(lambda: (_ for _ in ()).throw(RuntimeError("shapes do not match")))


# A process that runs out of memory in training

FAILING = """
    import os, sys
    import torch
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import runs
    from shared.run import command

    nlp = runs.load_recipe("nlp")
    build, passes = nlp.build_model, []

    def build_large(*arguments):
        model = build(*arguments)

        def allocate(module, inputs):
            passes.append(1)
            if os.environ["RANK"] == "1" and module.training and len(passes) == 30:
                Path(__file__).with_name("raised").touch()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        model.register_forward_pre_hook(allocate)
        return model

    nlp.build_model = build_large
    command.run(nlp.main, nlp.Config)
"""


def test_if_one_process_runs_out_of_memory_all_end_with_one_line_and_keep_the_checkpoint(texts, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(textwrap.dedent(FAILING).format(tests=str(runs.ROOT / "tests")))
    flags = [
        *runs.TINY,
        *texts,
        "--max_train_steps",
        1000,
        "--checkpointing_steps",
        1,
        "--expect_processes",
        2,
        "--output_dir",
        tmp_path / "run",
    ]
    codes, output = runs.run_forked(2, script, flags, tmp_path, timeout=200)
    seconds = time.time() - (tmp_path / "raised").stat().st_mtime
    assert seconds < 60, "the promise is 30 s on an idle machine; the timeout of the process group is 300 s"
    assert codes == [2, 2], output
    line = r"error: process 1 ran out of memory on a micro-batch of \d+ x \d+: lower --max_tokens_per_micro_batch 96; "
    assert len(re.findall(line, output)) == 1, output
    assert not any(f'File "{runs.ROOT / folder}' in output for folder in ("shared", "recipes"))
    saved = resuming.complete(tmp_path / "run")
    assert saved
    assert resuming.problem_with(saved[max(saved)]) is None
    assert not (tmp_path / "run/PREEMPTED").exists()
    assert not (tmp_path / "run/.lock").exists()
