"""Means, counts and the digest of the inputs do not depend on the number of processes or on the micro-batches."""

import json
from contextlib import nullcontext
from hashlib import sha256

import numpy as np
import pytest
import runs
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from hypothesis import given, settings
from hypothesis import strategies as st
from monitored_steps import LENGTHS, SKIPPED, WENT_WELL, monitor, plan, run_step

from shared.errors import UserError
from shared.plan.batches import MicroBatch


def test_the_loss_is_the_mean_over_the_steps_since_the_last_reading(accelerator):
    watch = monitor(accelerator)
    for step, loss in enumerate((2.0, 4.0, 9.0)):
        run_step(watch, plan(max_tokens=100).micro_batches(step), loss)
    assert watch.read()["loss"] == pytest.approx(5)
    run_step(watch, plan().micro_batches(3), 0.5)
    assert watch.read()["loss"] == pytest.approx(0.5)


def test_parts_of_a_loss_are_means_too_and_survive_a_resume(accelerator):
    def run(watch, steps):
        for step in steps:
            for piece in plan(max_tokens=100).micro_batches(step):
                share = torch.tensor(len(piece.samples) / piece.step_size)
                watch.add(piece, share * (step + 2), {"digit": share * 2, "sum": share * step})
            watch.end_step(WENT_WELL)
        return watch

    state = run(monitor(accelerator), range(1)).state()
    figures = run(monitor(accelerator, state=json.loads(json.dumps(state))), range(1, 3)).read()
    assert [figures[name] for name in ("loss", "loss_digit", "loss_sum")] == pytest.approx([3, 2, 1])
    watch = run(monitor(accelerator), range(1))
    with pytest.raises(UserError, match="a micro-batch has loss, an earlier one loss, loss_digit, loss_sum"):
        run_step(watch, plan().micro_batches(1))


def test_samples_tokens_and_waiting_are_reported_per_second_since_the_last_reading(accelerator, clock):
    waited = [1.0]
    watch = monitor(accelerator, waited=lambda: waited[0])
    pieces = plan().micro_batches(0)
    run_step(watch, pieces)
    clock[0], waited[0] = 104.0, 2.0
    figures = watch.read()
    assert figures["samples_per_second"] == 12 / 4
    assert figures["tokens_per_second"] == LENGTHS[pieces[0].samples].sum() / 4
    assert figures["data_wait"] == 1 / 4
    run_step(watch, plan().micro_batches(1))
    clock[0] = 106.0
    figures = watch.read()
    assert figures["samples_per_second"] == 12 / 2
    assert figures["data_wait"] == 0
    watch = monitor(accelerator, lengths=None)
    run_step(watch, plan(lengths=None, num_samples=40).micro_batches(0))
    clock[0] = 107.0
    assert "tokens_per_second" not in watch.read()


def digest(accelerator, steps, order=1, **values):
    """The digest after `steps` of a plan; one monitor is fed the micro-batches of all processes in turn."""
    watch = monitor(accelerator)
    for step in steps:
        for rank in range(values.get("num_processes", 1)):
            run_step(watch, plan(**values).micro_batches_of_all(step)[rank][::order])
    return watch.read()["samples"]


@settings(max_examples=30, deadline=None)
@given(st.integers(50, 700), st.integers(1, 5), st.booleans(), st.sampled_from([1, -1]))
def test_the_digest_does_not_depend_on_micro_batches_processes_or_the_order_of_samples(
    budget, processes, equal_counts, order
):
    expected = digest(Accelerator(cpu=True), range(4))
    values = {"max_tokens": budget, "num_processes": processes, "equal_counts": equal_counts}
    assert digest(Accelerator(cpu=True), range(4), order, **values) == expected


def test_the_digest_changes_with_a_sample_its_epoch_or_its_step(accelerator):
    digests = [
        digest(accelerator, range(3)),
        digest(accelerator, range(3), seed=4),
        digest(accelerator, range(4)),
        digest(accelerator, [0, 1, 3]),
        digest(accelerator, range(3), global_batch_size=13),
    ]
    assert len(set(digests)) == len(digests)
    # Each step has all forty samples, so that the two steps have the same samples in different epochs.
    whole = {"global_batch_size": 40, "max_steps": 2}
    assert digest(accelerator, [0], **whole) != digest(accelerator, [1], **whole)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_restored_monitor_reports_the_same_as_an_uninterrupted_one(accelerator, clock, stop):
    """It is saved at a logging step (4) or between two of them; the update of step 2 is skipped."""

    def run(watch, first, last):
        figures = []
        for step in range(first, last):
            pieces, skipped = plan(max_tokens=150).micro_batches(step), SKIPPED if step == 2 else WENT_WELL
            run_step(watch, pieces, 1 / (step + 1), skipped)
            clock[0] += 1
            if step % 2 == 1:
                figures.append(watch.read())
        return figures

    whole = monitor(accelerator)
    expected = run(whole, 0, 8)
    first = monitor(accelerator)
    figures = run(first, 0, stop)
    second = monitor(accelerator, state=first.state())
    figures += run(second, stop, 8)
    for key in ("samples", "skipped_updates"):
        assert [f[key] for f in figures] == [f[key] for f in expected]
    assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-6)
    assert second.summary(10.0) == whole.summary(10.0)


def test_gradients_that_differ_between_processes_are_refused(accelerator, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    for factor, message in ((1, None), (2, "the processes have different gradients, of norms 0.5, 1: ")):
        monkeypatch.setattr(accelerator, "gather", lambda rows, factor=factor: torch.cat([rows, factor * rows]))
        problem = runs.problem_of(monitor(accelerator).read, 0.5)
        assert problem == message or problem.startswith(message)


def test_the_summary_covers_the_whole_run(accelerator):
    watch = monitor(accelerator)
    for step in range(4):
        run_step(watch, plan().micro_batches(step))
        if step == 1:
            watch.read()
    fed = np.concatenate([plan().global_batch(step)[0] for step in range(4)])
    assert watch.summary(8.0) == {
        "train_runtime": 8.0,
        "train_samples_per_second": 48 / 8,
        "train_tokens_per_second": LENGTHS[fed].sum() / 8,
    }


def test_a_repeat_that_is_not_counted_adds_no_samples_and_no_tokens(accelerator):
    values = {"num_processes": 3, "equal_counts": True, "num_epochs": 1, "max_steps": None, "global_batch_size": 39}
    repeats = plan(**values).micro_batches_of_all(1)[2]  # one sample is left for three processes
    assert [piece.counted for piece in repeats] == [False]
    watch = monitor(accelerator)
    run_step(watch, repeats)
    state = watch.state()
    assert state["samples"] == state["tokens"] == 0
    assert state["digest"] == "0" * 16


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=1024.0)])
def test_the_summary_has_skipped_updates_and_the_loss_scale_only_if_an_update_was_skipped(
    accelerator, monkeypatch, scaler
):
    monkeypatch.setattr(accelerator, "scaler", scaler)
    watch = monitor(accelerator)
    skip(watch, [0])
    assert not {"skipped_updates", "loss_scale"} & set(watch.summary(1.0))
    skip(watch, [1, 0])
    found = {name: value for name, value in watch.summary(1.0).items() if name in ("skipped_updates", "loss_scale")}
    assert found == {"skipped_updates": 1} | ({"loss_scale": 1024.0} if scaler else {})


def skip(watch, pattern):
    for step, skipped in enumerate(pattern):
        run_step(watch, plan().micro_batches(step % 10), 1.0, torch.tensor(float(skipped)))


@pytest.mark.parametrize("already_read", [False, True])
def test_ten_skipped_updates_in_a_row_end_the_run_and_name_the_last_good_checkpoint(
    accelerator, tmp_path, already_read
):
    for step in (3, 20, 22, 25):
        folder = tmp_path / f"checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        saved = {
            "in_a_row": 2 if step == 20 else 0,
            "most_in_a_row": 10 if step == 22 else 2,
        }  # during and after the ten
        content = json.dumps({"monitor": saved})
        (folder / "state.json").write_text(content[: 9 if step == 25 else None])  # the last one is damaged
    (tmp_path / "checkpoints/step_00000030.partial").mkdir()
    watch = monitor(accelerator)
    skip(watch, [1] * 6)
    if already_read:  # a logging step is among the ten skipped updates
        watch.read()
        watch.refuse_skipped_updates(str(tmp_path))
    skip(watch, [1] * 4 + [0])  # a finite update after the ten does not hide them
    watch.read()
    with pytest.raises(UserError, match=r"10 steps in a row .* checkpoint: .*/checkpoints/step_00000003$"):
        watch.refuse_skipped_updates(str(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "read_after", "expected"),
    [
        ([1] * 9, None, "9 steps in a row"),  # a short run in which every update was skipped
        ([0] * 3 + [1] * 6 + [1] * 5, 9, "11 steps in a row"),  # some of them after the last reading
        (([1] * 9 + [0]) * 3, None, None),
        ([0] + [1] * 9, None, "warning: the updates of the last 9 of 10 steps were skipped"),
    ],
)
def test_a_run_that_ends_in_skipped_updates_fails_or_prints_a_warning(
    accelerator, tmp_path, capsys, pattern, read_after, expected
):
    watch = monitor(accelerator)
    skip(watch, pattern[:read_after])
    if read_after:
        watch.read()
        watch.refuse_skipped_updates(str(tmp_path))
        watch = monitor(accelerator, state=watch.state())  # resumed
        skip(watch, pattern[read_after:])
    if expected and "warning" not in expected:
        with pytest.raises(UserError, match=expected):
            watch.refuse_skipped_updates(str(tmp_path), len(pattern))
    else:
        watch.refuse_skipped_updates(str(tmp_path), len(pattern))
        assert capsys.readouterr().err.startswith(expected or "")
        assert bool(expected) == (pattern[-1] == 1)


def train(accelerator, folder):
    """Digests of the weights after some steps with DDP, with a monitor and without, and figures of the monitor."""
    digests, communication = [], []
    for watched in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.GELU(), torch.nn.Linear(40, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        model = accelerator.prepare(model)
        if watched:
            watch = monitor(accelerator, lengths=None, model=model)
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
            for last in (False, False, True):
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = model(torch.randn(8, 30, generator=generator)).pow(2).mean()
                    loss.backward()
                if watched:
                    samples = np.arange(8)
                    watch.add(MicroBatch(step, 0, samples, samples * 0, 24, last=last), loss)
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                watch.end_step(WENT_WELL)
        if watched:
            figures = watch.read()
            communication = [figures["communication"], figures["forward_backward"], figures["samples"]]
        state = torch.cat([p.detach().flatten() for p in model.parameters()])
        digests.append(sha256(state.numpy().tobytes()).hexdigest())
    return digests, communication


def test_monitoring_changes_no_bit_of_the_weights_and_three_processes_read_the_same_figures(tmp_path):
    found = runs.in_group(train, 3, tmp_path)
    assert len({digest for digests, _ in found for digest in digests}) == 1
    assert found[0][1] == found[1][1] == found[2][1]
    communication, computation, _ = found[0][1]
    assert 0 < communication < 1
    assert 0 < computation < 1
