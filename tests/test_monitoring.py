"""What a run reports: means, counts and the digest of what was fed, the same whoever fed it and however it was cut."""

import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import monitoring
from shared.batches import Plan
from shared.errors import UserError
from shared.monitoring import Monitor

LENGTHS = np.random.default_rng(0).integers(1, 50, 40)
WENT_WELL, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test says so."""
    now = [100.0]
    monkeypatch.setattr(monitoring.time, "perf_counter", lambda: now[0])
    return now


def monitor(accelerator, lengths=LENGTHS, waited=lambda: 0.0, state=None):
    return Monitor(accelerator, lengths, waited, state or {})


def plan(**values):
    return Plan(**{"lengths": LENGTHS, "seed": 3, "global_batch_size": 12, "max_steps": 10} | values)


def run_step(watch, pieces, loss=1.0, skipped=WENT_WELL):
    """Feed the micro-batches of a step whose mean loss is `loss`."""
    for piece in pieces:
        watch.add(piece, torch.tensor(loss * piece.counted * len(piece.samples) / piece.step_size))
    watch.end_step(skipped)


def test_the_loss_is_the_mean_over_the_steps_since_the_last_reading(accelerator):
    watch = monitor(accelerator)
    for step, loss in enumerate((2.0, 4.0, 9.0)):
        run_step(watch, plan(max_tokens=100).micro_batches(step), loss)
    assert watch.read()["loss"] == pytest.approx(5)
    run_step(watch, plan().micro_batches(3), 0.5)
    assert watch.read()["loss"] == pytest.approx(0.5)


def test_samples_tokens_and_waiting_are_told_per_second_since_the_last_reading(accelerator, clock):
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


def test_without_lengths_no_tokens_are_told(accelerator):
    watch = monitor(accelerator, lengths=None)
    run_step(watch, plan(lengths=None, num_samples=40).micro_batches(0))
    assert "tokens_per_second" not in watch.read()
    assert "train_tokens_per_second" not in watch.summary(2.0)


def digest(accelerator, steps, order=1, **values):
    """The digest after some steps of a plan, fed by one process after the other."""
    watch = monitor(accelerator)
    for step in steps:
        for rank in range(values.get("num_processes", 1)):
            run_step(watch, plan(**values).micro_batches(step, rank)[::order])
    return watch.read()["samples"]


@settings(max_examples=30, deadline=None)
@given(st.integers(50, 700), st.integers(1, 5), st.booleans(), st.sampled_from([1, -1]))
def test_the_digest_knows_the_samples_and_neither_cut_nor_process_nor_order(budget, processes, equal_counts, order):
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
    # Forty samples in steps of twenty: the same ones, in the same steps of another epoch.
    whole = {"global_batch_size": 40, "max_steps": 2}
    assert digest(accelerator, [0], **whole) != digest(accelerator, [1], **whole)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_restored_monitor_goes_on_as_if_nothing_had_happened(accelerator, clock, stop):
    """Stopped at a logging step (4) or between two of them, one of which had a skipped update."""

    def run(watch, first, last, stops=False):
        figures = []
        for step in range(first, last):
            run_step(
                watch, plan(max_tokens=150).micro_batches(step), 1 / (step + 1), SKIPPED if step == 2 else WENT_WELL
            )
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


def test_the_state_is_plain_json_and_reading_it_changes_nothing(accelerator):
    watch = monitor(accelerator)
    run_step(watch, plan().micro_batches(0), 2.0, SKIPPED)
    state = watch.state()
    assert json.loads(json.dumps(state)) == state
    assert watch.state() == state | {"waited": watch.state()["waited"]}
    assert watch.read()["loss"] == pytest.approx(2)


def test_the_summary_is_over_the_whole_run(accelerator):
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


def test_a_repeat_without_weight_counts_neither_as_sample_nor_as_token(accelerator):
    values = {"num_processes": 3, "equal_counts": True, "num_epochs": 1, "max_steps": None, "global_batch_size": 39}
    repeats = plan(**values).micro_batches(1, 2)  # one sample is left for three processes
    assert [piece.counted for piece in repeats] == [False]
    watch = monitor(accelerator)
    run_step(watch, repeats)
    state = watch.state()
    assert state["samples"] == state["tokens"] == 0
    assert state["digest"] == "0" * 16


def test_skipped_updates_are_counted_since_the_run_began(accelerator):
    watch = monitor(accelerator)
    counts = []
    for step, skipped in enumerate([0, 1, 0, 1, 1, 0]):
        run_step(watch, plan().micro_batches(step), math.nan if skipped else 1.0, torch.tensor(float(skipped)))
        counts.append(watch.read()["skipped_updates"])
    assert counts == [0, 1, 1, 2, 3, 3]


def skip(watch, pattern):
    for step, skipped in enumerate(pattern):
        run_step(watch, plan().micro_batches(step % 10), 1.0, torch.tensor(float(skipped)))


@pytest.mark.parametrize("already_read", [False, True])
def test_ten_skipped_updates_in_a_row_end_the_run_and_name_the_last_good_checkpoint(
    accelerator, tmp_path, already_read
):
    for step in (3, 20):
        folder = tmp_path / f"checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints/step_00000030.partial").mkdir()
    watch = monitor(accelerator)
    skip(watch, [1] * 6)
    if already_read:  # the row reaches over a logging step
        watch.read()
        watch.refuse_divergence(str(tmp_path))
    skip(watch, [1] * 4 + [0])  # that the last update is finite again does not hide the ten
    watch.read()
    with pytest.raises(UserError, match=r"10 steps in a row .* checkpoint: .*/checkpoints/step_00000020$"):
        watch.refuse_divergence(str(tmp_path))


def test_nine_skipped_updates_in_a_row_are_borne_and_so_are_many_apart(accelerator, tmp_path):
    watch = monitor(accelerator)
    skip(watch, ([1] * 9 + [0]) * 3)
    assert watch.read()["skipped_updates"] == 27
    watch.refuse_divergence(str(tmp_path))


def test_a_divergence_long_ago_does_not_end_a_run_that_was_resumed(accelerator, tmp_path):
    """The checkpoint between keeps a row that is still going on, and nothing of one that is over."""
    watch = monitor(accelerator)
    skip(watch, [1] * 9)
    watch = monitor(accelerator, state=watch.state())
    skip(watch, [1])
    watch.read()
    with pytest.raises(UserError, match="10 steps in a row"):
        watch.refuse_divergence(str(tmp_path))
    skip(watch, [0])
    watch.read()
    watch.refuse_divergence(str(tmp_path))
