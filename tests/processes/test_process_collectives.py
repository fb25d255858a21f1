"""The result or the error of one process reaches every process."""

from types import SimpleNamespace

import pytest
import torch

from shared.errors import UserError
from shared.processes import barrier, collectives


def test_every_process_raises_the_error_of_the_lowest_rank_that_has_one(monkeypatch):
    def gather(messages, mine):
        messages[:] = [None, mine, "of rank 2"]

    monkeypatch.setattr(barrier, "wait_for_all", lambda _: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    three = SimpleNamespace(num_processes=3)
    with pytest.raises(UserError, match="of rank 2"):
        collectives.agree(three, None)
    with pytest.raises(UserError, match="of rank 1"):
        collectives.agree(three, UserError("of rank 1"))


def test_one_process_agrees_with_itself():
    alone = SimpleNamespace(num_processes=1)
    collectives.agree(alone, None)
    with pytest.raises(UserError, match="mine"):
        collectives.agree(alone, UserError("mine"))


@pytest.mark.parametrize("main", [True, False])
def test_every_process_gets_the_result_or_error_of_the_main_process(monkeypatch, main):
    sent = []
    two = SimpleNamespace(num_processes=2, is_main_process=main)

    def broadcast(outcome):
        if main:
            sent.append(list(outcome))
        else:
            outcome[:] = sent[-1]

    def fail():
        raise UserError("found by one")

    def never():
        raise AssertionError("called on a process that is not the main one")

    monkeypatch.setattr(barrier, "wait_for_all", lambda _: None)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    sent.append([7, None])
    assert collectives.on_main_process(two, (lambda: 7) if main else never) == 7
    assert sent[-1] == [7, None]
    sent.append([None, "found by one"])
    with pytest.raises(UserError, match="found by one"):
        collectives.on_main_process(two, fail if main else never)
    assert sent[-1] == [None, "found by one"]
