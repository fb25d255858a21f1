"""What a run reports: means, counts and the digest of what was fed, the same whoever fed it and however it was cut."""

import json
import math
from contextlib import nullcontext
from hashlib import sha256

import numpy as np
import pytest
import runs
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from shared.config.options import Options
from shared.errors import UserError
from shared.launch.gradient_compression import DDPSettings
from shared.monitoring import monitor as monitoring
from shared.monitoring import step_timer
from shared.monitoring.flops import FlopCounter, attention_flops
from shared.monitoring.monitor import Monitor, costs
from shared.monitoring.step_timer import Stopwatch
from shared.monitoring.time_report import seconds_by_part
from shared.plan.batches import MicroBatch, Plan

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


def monitor(accelerator, lengths=LENGTHS, waited=lambda: 0.0, state=None, model=None):
    model = model or torch.nn.Linear(1, 1)
    return Monitor(accelerator, lengths, waited, state or {}, model, Options(peak_tflops=1.0))


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
    assert watch.state() == state
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
        in_a_row = 2 if step == 20 else 0  # that one was saved within the row
        (folder / "state.json").write_text(json.dumps({"monitor": {"in_a_row": in_a_row}}))
    (tmp_path / "checkpoints/step_00000030.partial").mkdir()
    watch = monitor(accelerator)
    skip(watch, [1] * 6)
    if already_read:  # the row reaches over a logging step
        watch.read()
        watch.refuse_divergence(str(tmp_path))
    skip(watch, [1] * 4 + [0])  # that the last update is finite again does not hide the ten
    watch.read()
    with pytest.raises(UserError, match=r"10 steps in a row .* checkpoint: .*/checkpoints/step_00000003$"):
        watch.refuse_divergence(str(tmp_path))


def test_nine_skipped_updates_in_a_row_are_borne_and_so_are_many_apart(accelerator, tmp_path):
    watch = monitor(accelerator)
    skip(watch, ([1] * 9 + [0]) * 3)
    assert watch.read()["skipped_updates"] == 27
    watch.refuse_divergence(str(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "read_after", "said"),
    [
        ([1] * 9, None, "9 steps in a row"),  # a short run of which nothing is left
        ([1], None, "1 steps in a row"),
        ([0] * 3 + [1] * 6 + [1] * 5, 9, "11 steps in a row"),  # partly after the last reading
        ([1] * 9 + [0], None, None),
        ([0] + [1] * 9, None, "warning: the updates of the last 9 of 10 steps were skipped"),
    ],
)
def test_a_run_that_ends_in_skipped_updates_is_refused_or_says_so(
    accelerator, tmp_path, capsys, pattern, read_after, said
):
    watch = monitor(accelerator)
    skip(watch, pattern[:read_after])
    if read_after:
        watch.read()
        watch.refuse_divergence(str(tmp_path))
        skip(watch, pattern[read_after:])
    if said and "warning" not in said:
        with pytest.raises(UserError, match=said):
            watch.refuse_divergence(str(tmp_path), len(pattern))
    else:
        watch.refuse_divergence(str(tmp_path), len(pattern))
        assert capsys.readouterr().err.startswith(said or "")
        assert bool(said) == (pattern[-1] == 1)


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


# Where the time goes


class Slow(torch.nn.Module):
    """A model of one layer whose forward pass takes a second of the test's clock."""

    def __init__(self, clock):
        super().__init__()
        self.layer, self.clock = torch.nn.Linear(3, 5), clock

    def forward(self, ids):
        self.clock[0] += 1
        return self.layer(torch.ones(*ids.shape, 3))


def timed_steps(accelerator, clock, steps=2):
    """Steps of two micro-batches: 1 s of waiting and 2 s of computing for each, 0.5 s for the update."""
    waited, model = [0.0], Slow(clock)
    watch = monitor(accelerator, waited=lambda: waited[0], model=model)
    for step in range(steps):
        for piece in plan(micro_batches=2).micro_batches(step):
            clock[0] += 1
            waited[0] += 1
            out = model(torch.zeros(len(piece.samples), int(LENGTHS[piece.samples].max()), dtype=torch.long))
            clock[0] += 1
            watch.add(piece, out.sum() * 0)
        clock[0] += 0.5
        watch.end_step(WENT_WELL)
    return watch


def test_a_step_is_split_into_data_computation_and_update(accelerator, clock):
    figures = timed_steps(accelerator, clock).read()
    assert figures["step_seconds"] == 6.5
    assert figures["data_wait"] == 2 / 6.5
    assert figures["forward_backward"] == 4 / 6.5
    assert figures["optimizer"] == 0.5 / 6.5
    assert figures["communication"] == 0


def test_evaluation_and_checkpoints_are_not_in_the_rates(accelerator, clock):
    watch = timed_steps(accelerator, clock)
    with watch.timed("evaluation"):
        clock[0] += 100
    with watch.timed("checkpoint"):
        clock[0] += 10
    figures = watch.read()
    assert figures["samples_per_second"] == 24 / 13
    assert figures["step_seconds"] == 6.5
    assert (figures["evaluation_seconds"], figures["checkpoint_seconds"]) == (100, 10)
    with watch.timed("checkpoint"):
        clock[0] += 7
    assert watch.summary(50.0)["checkpoint_seconds"] == 7
    assert "evaluation_seconds" not in watch.summary(50.0)


def test_an_evaluation_of_the_same_model_counts_neither_as_padding_nor_as_waiting(accelerator, clock):
    watch = timed_steps(accelerator, clock)
    before = watch.passes.positions
    model = Slow(clock).eval()
    watch.passes._begin(model, (torch.zeros(9, 9),), {})
    assert watch.passes.positions == before


def test_padding_and_utilisation_are_of_real_tokens(accelerator, clock):
    figures = timed_steps(accelerator, clock).read()
    pieces = [piece for step in range(2) for piece in plan(micro_batches=2).micro_batches(step)]
    real = sum(LENGTHS[piece.samples].sum() for piece in pieces)
    area = sum(len(piece.samples) * LENGTHS[piece.samples].max() for piece in pieces)
    assert figures["padding"] == pytest.approx(1 - real / area)
    assert figures["mfu"] == pytest.approx(3 * 2 * 3 * 5 * real / 13 / 1e12)  # three passes of 2 x 3 x 5 each


def test_the_attention_of_a_sequence_counts_with_the_square_of_its_length():
    config = type("Config", (), {"num_hidden_layers": 2, "hidden_size": 8})()
    model = torch.nn.Linear(1, 1)
    model.config = config
    assert attention_flops(model) == 12 * 2 * 8
    assert attention_flops(torch.nn.Linear(1, 1)) == 0


def test_convolutions_count_each_output_with_its_kernel():
    model = torch.nn.Conv2d(4, 6, 3, groups=2)
    counter = FlopCounter(model)
    model(torch.ones(2, 4, 10, 10))
    assert counter.stop() == 2 * (2 * 6 * 8 * 8) * (4 // 2 * 3 * 3)
    model(torch.ones(2, 4, 10, 10))
    assert counter.counted == 2 * (2 * 6 * 8 * 8) * (4 // 2 * 3 * 3)


class Recomputing(torch.nn.Module):
    """Layers of which those inside are computed again in the backward pass, as far as something needs them."""

    def __init__(self, again):
        super().__init__()
        self.first, self.again = torch.nn.Linear(3, 5), again
        self.inside = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))

    def forward(self, ids):
        hidden = self.first(torch.ones(*ids.shape, 3))
        return checkpoint(self.inside, hidden, use_reentrant=False) if self.again else self.inside(hidden)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_recomputed_layers_count_once(accelerator, clock, again):
    """Over several micro-batches, and after an evaluation of the same model."""
    model = Recomputing(again)
    watch = monitor(accelerator, model=model)
    model.eval()(torch.zeros(7, 7))
    model.train()
    real = 0
    for piece in plan(micro_batches=3).micro_batches(0):
        out = model(torch.zeros(len(piece.samples), int(LENGTHS[piece.samples].max())))
        out.sum().backward()
        watch.add(piece, out.sum())
        real += LENGTHS[piece.samples].sum()
    watch.end_step(WENT_WELL)
    clock[0] += 2
    assert watch.read()["mfu"] == pytest.approx(3 * 2 * (3 * 5 + 2 * 5 * 7) * real / 2 / 1e12)


def test_the_figures_of_a_resumed_run_are_of_the_steps_that_it_took(accelerator, clock):
    """Ten steps from one reading to the next, eight of them before the run was started again."""

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


def test_the_first_reading_of_a_run_resumed_into_a_new_folder_counts_no_steps_of_the_old_one(accelerator, clock):
    """Saved at a logging step: step 510 is the first line of the new metrics.jsonl, and ten steps were taken."""
    again = monitor(accelerator, state=monitor(accelerator).state())
    for step in range(10):
        run_step(again, plan().micro_batches(step))
        clock[0] += 0.1
    assert sum(seconds_by_part([{"step": 510, **again.read()}]).values()) == pytest.approx(1)


def rows(**values):
    """The figures of three processes, of which each did the same unless `values` says otherwise."""
    names = ["data", "forward_backward", "communication", "optimizer", "evaluation", "checkpoint", "flops", "tokens"]
    names += ["positions", "seconds", "peak_flops", "peak_memory", "reserved_memory"]
    same = {name: np.ones(3) for name in names} | {"utilization": np.full(3, np.nan)}
    return same | {name: np.array(three) for name, three in values.items()}


def test_the_slowest_process_is_named_when_it_is_more_than_a_tenth_behind():
    assert "slowest_process" not in costs(rows(forward_backward=[1.0, 1.29, 1.0]), 1)  # 3.29 against 3
    figures = costs(rows(forward_backward=[1.0, 1.6, 1.0]), 1)
    assert figures["slowest_process"] == 1
    assert figures["slowest_process_behind"] == pytest.approx(0.2)


def test_waiting_for_others_makes_no_process_slow():
    assert "slowest_process" not in costs(rows(communication=[0.0, 9.0, 0.0]), 1)


def test_memory_is_that_of_the_largest_process_and_shares_are_means():
    figures = costs(rows(peak_memory=[1.0, 7.0, 2.0], data=[0.0, 0.3, 0.6], utilization=[0.5, 0.6, 0.7]), 2)
    assert figures["peak_memory_bytes"] == 7
    assert figures["data_wait"] == pytest.approx(0.3)
    assert figures["step_seconds"] == 0.5
    assert figures["gpu_utilization"] == pytest.approx(0.6)


WAITS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "nonzero")


def test_the_host_waits_for_the_device_at_readings_only(accelerator, clock, monkeypatch):
    """Every call that would wait for a GPU is counted; steps have none, a reading a number that steps do not change."""
    waits = [0]
    for name in WAITS:
        original = getattr(torch.Tensor, name)

        def counted(*args, original=original, **kwargs):
            waits[0] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    found = []
    for steps in (1, 5):
        waits[0] = 0
        watch = timed_steps(accelerator, clock, steps)
        assert waits[0] == 0
        watch.read()
        found.append(waits[0])
    assert found[0] == found[1] > 0


def test_with_a_gpu_the_host_waits_for_an_event_at_readings_only(accelerator, monkeypatch):
    """Events of the device that tell an own clock, in milliseconds, once somebody has waited for them."""

    class Event:
        made, waits = 0, 0

        def __init__(self, enable_timing):
            assert enable_timing
            self.at = None

        def record(self):
            Event.made += 1
            self.at = Event.made

        def synchronize(self):
            Event.waits = Event.waits + 1

        def elapsed_time(self, later):
            assert Event.waits, "read before the device was there"
            return (later.at - self.at) * 1000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(monitoring, "Stopwatch", lambda _: Stopwatch(torch.device("cuda")))
    for steps in (1, 5):
        model = torch.nn.Linear(1, 1)
        watch = monitor(accelerator, waited=lambda: 1e6, model=model)
        Event.waits = 0
        for step in range(steps):
            for piece in plan(micro_batches=2).micro_batches(step):
                model(torch.zeros(len(piece.samples), 1))
                watch.add(piece, torch.tensor(0.0))
            watch.end_step(WENT_WELL)
        assert Event.waits == 0
        before = dict(watch.stopwatch.seconds)
        watch.read()
        assert Event.waits == 2, "for the figures, and for where the next ones begin"
        passed = {part: seconds - before[part] for part, seconds in watch.stopwatch.seconds.items()}
        # One event before each pass, one after it, one after the update: each ends what began with the one before.
        assert (passed["data"], passed["forward_backward"], passed["optimizer"]) == (2 * steps, 2 * steps, steps)


@pytest.mark.parametrize(
    ("told", "done", "expected"),
    [
        # When the host has told of the ends of two passes and when the GPU is done with them, in seconds.
        ((0.1, 0.2), (0.1001, 0.2002), 1.0),  # each time it has done what there was
        ((0.1, 0.2), (0.5, 1.0), 0.0),
        ((0.1, 0.6), (0.5, 0.6003), pytest.approx(0.1003 / 0.6003)),
        ((11.0, 12.0), (11.0, 12.0), None),  # after so long the clocks say nothing
    ],
)
def test_a_gpu_that_has_caught_up_with_the_host_at_each_mark_is_bound_by_it(monkeypatch, told, done, expected):
    host, device = iter([0.0, 0.0, *told]), iter([0.0, *done])

    class Event:
        def __init__(self, enable_timing):
            self.at = next(device)

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return (later.at - self.at) * 1000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(host))
    stopwatch = Stopwatch(torch.device("cuda"))
    for part in ("forward_backward", "optimizer"):
        stopwatch.mark(part)
    read = stopwatch.read()
    parts = {name: np.array([read.get(name, 0.0)]) for name in (*step_timer.PARTS, "watched", "starved")}
    others = ("flops", "peak_memory", "reserved_memory", "tokens", "positions", "utilization")
    rows = parts | {name: np.zeros(1) for name in others} | {"seconds": np.ones(1), "peak_flops": np.ones(1)}
    assert monitoring.costs(rows, 1).get("host_bound") == expected


def train(accelerator, folder):
    """Weights after some steps of DDP with three micro-batches each, with a monitor and without, and its shares."""
    digests, communication = [], []
    for watched in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.GELU(), torch.nn.Linear(40, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        accelerator.ddp_handler = DDPSettings("none")
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


def test_monitoring_changes_no_bit_on_three_processes_and_all_of_them_read_the_same(tmp_path):
    found = runs.in_group(train, 3, tmp_path)
    assert len({digest for digests, _ in found for digest in digests}) == 1
    assert found[0][1] == found[1][1] == found[2][1]
    communication, computation, _ = found[0][1]
    assert 0 < communication < 1
    assert 0 < computation < 1


def test_a_gpu_that_does_not_say_how_busy_it_is_has_no_such_figure(monkeypatch):
    """A part of a GPU (MIG) has none, and pynvml raises then."""

    def raise_it(device):
        raise NotImplementedError("NVMLError_NotSupported")

    cuda = torch.device("cuda")
    monkeypatch.setattr(monitoring.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
    assert monitoring.utilization(cuda) == 0.4
    monkeypatch.setattr(torch.cuda, "utilization", raise_it)
    assert math.isnan(monitoring.utilization(cuda))
    assert math.isnan(monitoring.utilization(torch.device("cpu")))
