"""The time table at the end of a run adds up, and its advice fits the figures."""

import re

import pytest

from shared.extras.costs import breakdown, seconds_by_part

LINE = {"step_seconds": 0.5, "data_wait": 0.1, "forward_backward": 0.6, "communication": 0.2, "optimizer": 0.04}


def test_seconds_cover_the_steps_and_the_evaluations_and_checkpoints_between_them():
    lines = [
        {"step": 10, **LINE},
        {"step": 14, **LINE, "step_seconds": 1.0, "evaluation_seconds": 3.0, "checkpoint_seconds": 1.5},
        {"step": 14, "eval_loss": 0.3},
        {"step": 14, "train_runtime": 20.0, "evaluation_seconds": 2.0},
    ]
    expected = {"data_wait": 0.9, "forward_backward": 5.4, "communication": 1.8, "optimizer": 0.36, "rest": 0.54}
    assert seconds_by_part(lines) == pytest.approx(expected | {"evaluation": 5.0, "checkpoint": 1.5})


def test_the_table_reads_as_a_sentence_that_adds_up():
    output = breakdown([{"step": 100, **LINE, "mfu": 0.31, "padding": 0.02, "peak_memory_bytes": 3 * 2**20}])
    first, facts = output.splitlines()
    shares = "60 % compute, 10 % data, 20 % communication, 4 % optimizer, 6 % outside the model"
    assert first == f"  where 50.0 s went: {shares}"
    assert facts == "  MFU 31 %, padding 2.0 %, peak memory 3 MiB per process"


def test_skipped_updates_are_reported_at_the_end_with_the_loss_scale_of_fp16():
    assert not breakdown([{"step": 1, "loss": 2.0}]), "nothing was timed"
    line, last, skipped = {"step": 100, **LINE}, {"step": 100, "train_runtime": 1.0}, {"skipped_updates": 3}
    said = f"{breakdown([line])}\n  3 of 100 updates were skipped, because their gradients were not finite"
    assert breakdown([line, last]) == breakdown([line])
    assert breakdown([line, last | skipped]) == said
    assert breakdown([line, last | skipped | {"loss_scale": 8192.0}]) == f"{said} (loss scale at the end 8,192)"


def test_a_slow_process_is_named_with_the_number_of_readings_it_was_behind():
    lines = [{"step": i, **LINE, "slowest_process": 2.0, "slowest_process_behind": 0.4} for i in (1, 2)]
    assert "process 2 was over 10 % behind the others in 2 of 3 readings" in breakdown([*lines, {"step": 3, **LINE}])


@pytest.mark.parametrize(
    ("large", "settings", "flags"),
    [
        ("data_wait", {}, ["--dataloader_num_workers"]),
        ("communication", {}, ["--global_batch_size", "--gradient_compression bf16"]),
        ("communication", {"compressed": True}, ["--global_batch_size"]),  # what is on is not advised
        ("padding", {"unpacked": True}, ["--packing", "--global_batch_size"]),  # first what keeps the steps
        ("padding", {}, ["--global_batch_size"]),
        *((part, {"unpacked": True}, []) for part in ("forward_backward", "optimizer", "rest", "none")),
    ],
)
def test_a_large_share_gives_advice_only_where_a_flag_that_is_not_set_can_lower_it(large, settings, flags):
    figures = dict.fromkeys(LINE, 0.0) | {"step_seconds": 1.0, large: 0.9}
    said = breakdown([{"step": 200, **figures}], **settings).partition("advice: ")[2]
    assert re.findall(r"--\w+(?: bf16)?", said) == flags


@pytest.mark.parametrize(("step", "advised"), [(119, False), (120, True)])
def test_a_run_of_less_than_a_minute_gets_no_advice(step, advised):
    lines = [{"step": step, **LINE, "data_wait": 0.3, "communication": 0.0}]
    assert ("advice: the steps wait for data" in breakdown(lines)) == advised
    first_evaluation = [{"step": 20, **LINE, "evaluation_seconds": 9.0}]  # of 19 s; this includes imports
    assert "advice" not in breakdown(first_evaluation)


def test_the_share_in_which_a_gpu_waits_for_the_host_leaves_out_the_first_reading():
    for values, share in (((0.9, 0.7), 70), ((0.7,), 70), ((0.9, 0.4, 0.5), 45)):  # it has what is done once
        lines = [LINE | {"step": i, "host_bound": value} for i, value in enumerate(values, 1)]
        assert breakdown(lines).splitlines()[1:] == [f"  host-bound {share} %"]
