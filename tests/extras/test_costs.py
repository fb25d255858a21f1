"""The time of a step is split into parts; measuring them does not make the host wait for the device."""

import itertools

import pytest
import torch
from monitored_steps import WENT_WELL, Slow, monitor, plan, rows, run_step, timed_steps

from shared.extras import costs as extras_costs
from shared.extras.costs import Stopwatch, costs, seconds_by_part


def test_forward_passes_before_the_backward_passes_are_computation(accelerator, clock):
    model = Slow(clock)
    watch = monitor(accelerator, model=model)
    pieces = plan(micro_batches_per_step=2).micro_batches(0)
    clock[0] += 1
    for piece in pieces:
        model(torch.zeros(len(piece.samples), 1))
    run_step(watch, pieces)
    assert watch.read()["forward_backward"] == 2 / 3


def test_a_step_is_split_into_its_parts_and_the_rates_exclude_evaluation_and_checkpoints(accelerator, clock):
    watch = timed_steps(accelerator, clock)
    with watch.timed("evaluation"):
        clock[0] += 100
    with watch.timed("checkpoint"):
        clock[0] += 10
    figures = watch.read()
    assert figures["samples_per_second"] == 24 / 13
    assert figures["step_seconds"] == 6.5
    parts = [figures[part] for part in ("data_wait", "forward_backward", "optimizer", "communication")]
    assert parts == [2 / 6.5, 4 / 6.5, 0.5 / 6.5, 0]
    assert (figures["evaluation_seconds"], figures["checkpoint_seconds"]) == (100, 10)
    with watch.timed("checkpoint"):
        clock[0] += 7
    assert watch.summary(50.0)["checkpoint_seconds"] == 7
    assert "evaluation_seconds" not in watch.summary(50.0)


def test_a_resumed_run_reports_the_times_of_its_own_steps_only(accelerator, clock):
    """There are ten steps between two readings; eight of them ran before the run was resumed."""

    def take(watch, steps):
        for step in steps:
            run_step(watch, plan().micro_batches(step))
            clock[0] += 0.1
        return watch

    before = take(monitor(accelerator), range(8))
    again = take(monitor(accelerator, state=before.state()), range(8, 10))
    figures = again.read()
    assert figures["step_seconds"] == pytest.approx(0.1)
    assert figures["timed_steps"] == 2
    assert figures["loss"] == pytest.approx(1)
    assert sum(seconds_by_part([{"step": 10, **figures}]).values()) == pytest.approx(0.2)
    later = take(again, range(10)).read()
    assert later["step_seconds"] == pytest.approx(0.1)
    assert "timed_steps" not in later
    # In a new folder, the first line after a checkpoint of logging step 500 is that of step 510.
    first = take(monitor(accelerator, state=monitor(accelerator).state()), range(10)).read()
    assert sum(seconds_by_part([{"step": 510, **first}]).values()) == pytest.approx(1)


def test_memory_is_the_maximum_over_processes_and_shares_are_means():
    figures = costs(rows(peak_memory=[1.0, 7.0, 2.0], data_wait=[0.0, 0.3, 0.6]))
    assert figures["peak_memory_bytes"] == 7
    assert figures["data_wait"] == pytest.approx(0.3)


def test_a_process_that_works_more_than_a_tenth_longer_is_named_and_one_that_waits_is_not():
    assert "slowest_process" not in costs(rows(communication=[0.0, 9.0, 0.0]))
    assert "slowest_process" not in costs(rows(forward_backward=[1.0, 1.29, 1.0]))  # 3.29 against 3
    figures = costs(rows(forward_backward=[1.0, 1.6, 1.0]))
    assert figures["slowest_process"] == 1
    assert figures["slowest_process_behind"] == pytest.approx(0.2)


@pytest.fixture
def event(monkeypatch):
    """The stand-in for CUDA events, which can be read only after a wait; `times` are those of the events in seconds."""

    class Event:
        times, waits = itertools.count(), 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(Event.times)

        def synchronize(self):
            Event.waits += 1

        def elapsed_time(self, later):
            assert Event.waits, "read before the device reached the event"
            return (later.at - self.at) * 1000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event


def test_with_a_gpu_the_host_waits_for_events_only_at_readings(accelerator, monkeypatch, event):
    monkeypatch.setattr(extras_costs, "Stopwatch", lambda _: Stopwatch(torch.device("cuda")))
    for steps in (1, 5):
        model = torch.nn.Linear(1, 1)
        watch = monitor(accelerator, waited=lambda: 1e6, model=model)
        event.waits = 0
        for step in range(steps):
            for piece in plan(micro_batches_per_step=2).micro_batches(step):
                model(torch.zeros(len(piece.samples), 1))
                watch.add(piece, torch.tensor(0.0))
            watch.end_step(WENT_WELL)
        assert event.waits == 0
        passed = watch.hooks[1].stopwatch.read()
        watch.read()
        assert event.waits == 2, "one wait for each reading"
        # One event before each pass, one after it, one after the update: each ends the part since the previous event.
        assert (passed["data_wait"], passed["forward_backward"], passed["optimizer"]) == (2 * steps, 2 * steps, steps)


@pytest.mark.parametrize(
    ("recorded", "reached", "expected"),
    [
        # Seconds at which the host records the ends of two parts, and at which the GPU reaches these ends.
        ((0.1, 0.2), (0.1001, 0.2002), 1.0),  # the GPU has caught up at both ends
        ((0.1, 0.2), (0.5, 1.0), 0.0),
        ((0.1, 0.6), (0.5, 0.6003), pytest.approx(0.1003 / 0.6003)),
        ((11.0, 12.0), (11.0, 12.0), None),  # after so long a time, the two clocks cannot be compared
    ],
)
def test_a_gpu_that_has_caught_up_with_the_host_at_a_mark_counts_as_host_bound(
    monkeypatch, event, recorded, reached, expected
):
    host, event.times = iter([0.0, 0.0, *recorded]), iter([0.0, *reached])
    monkeypatch.setattr(extras_costs.time, "perf_counter", lambda: next(host))
    stopwatch = Stopwatch(torch.device("cuda"))
    for part in ("forward_backward", "optimizer"):
        stopwatch.mark(part)
    read = stopwatch.read()
    assert costs(rows(**{name: [read[name]] * 3 for name in ("watched", "starved")})).get("host_bound") == expected
