"""The launch card shows the micro-batches, what depends on the processes, and settings that have no effect."""

import re

import numpy as np
import pytest

from shared.checkpoints.progress import Progress
from shared.plan.batches import Plan
from shared.run.launch_card import alone, batch_equation, notes_on_processes


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"max_samples": 32}, "1 process x 1 micro-batch of 32 samples (<= 32 samples)"),
        ({"max_samples": 32, "num_processes": 2}, "2 processes x 1 micro-batch of 16 samples (<= 32 samples)"),
        ({"max_samples": 8, "num_processes": 2}, "2 processes x 2 micro-batches of 8 samples (<= 8 samples)"),
        ({"num_processes": 3}, "3 processes x 1 micro-batch of ~11 samples"),
        (
            {"lengths": np.tile([90, 10], 50), "max_tokens": 400, "num_processes": 3},
            "3 processes x ~2.67 micro-batches of ~4 samples (<= 400 tokens)",
        ),
    ],
)
def test_the_batch_equation_has_the_real_sizes_of_the_micro_batches(plan, expected):
    plan = Plan(**{"num_samples": 100, "seed": 0, "global_batch_size": 32, "num_epochs": 1} | plan)
    for step in (0, 3, plan.total_steps):  # step 3 has four samples
        assert batch_equation(plan, step) == f"global batch 32 = {expected}"


def notes(plan, step=0, before=None, first=None):
    """The notes of a run that is fresh, or resumed after `before` processes and begun on `first`."""
    plan = Plan(**{"seed": 0, "num_epochs": 1} | plan)
    plan.first_processes = first or plan.num_processes
    return notes_on_processes(plan, Progress(step=step, world_size=before))


UNIFORM = {"num_samples": 1497, "global_batch_size": 128, "num_epochs": 3, "max_samples": 16}


def test_each_step_is_noted_where_every_process_needs_a_part_of_it():
    said = notes({"num_samples": 96, "global_batch_size": 32, "num_processes": 2})["note"]
    assert re.match(
        "some steps have more micro-batches than the config requires, so that every process has work: ", said
    )
    assert said.endswith("dropout, batch norm and mixup depend on the number of processes there")


def test_a_resume_says_what_is_true_for_the_remaining_steps():
    one_piece = {"num_samples": 96, "global_batch_size": 32}
    two = one_piece | {"num_processes": 2}
    assert "resumed on" not in notes(two, 1, before=2)
    assert notes(UNIFORM | {"num_processes": 2}) == {}, "the last step has 11 samples and is not cut"
    assert notes(UNIFORM, 1, before=2, first=2) == {"resumed on": "1 process, saved on 2: equal up to rounding"}
    shrunk = notes(one_piece, 1, before=2, first=2)
    assert shrunk["resumed on"] == "1 process, saved on 2: equal up to rounding"
    assert "as on the 2 processes of the first launch" in shrunk["note"]
    grown = notes(two, 1, before=1, first=1)["resumed on"]
    assert grown == (
        "2 processes, saved on 1: some steps have other micro-batches; equal up to rounding without dropout, batch "
        "norm and mixup, with them another run"
    )


def test_a_single_process_of_a_launch_that_asked_for_more_is_noted(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert alone() == "1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert alone().startswith("1, although MASTER_ADDR is set, as for several: ")
