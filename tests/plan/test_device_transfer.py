"""Batches are put on the device one ahead, in order; errors reach the training loop."""

import threading

import pytest
import torch

from shared.plan.device_transfer import put_ahead

CPU = torch.device("cpu")


def test_each_batch_is_put_on_the_device_while_the_one_before_is_used():
    begun, events = [], [threading.Event() for _ in range(4)]

    def put(micro_batch, batch, device):
        assert device == CPU
        assert threading.current_thread() is not threading.main_thread()
        begun.append(micro_batch)
        events[micro_batch].set()
        return {"doubled": 2 * batch}

    found = []
    for micro_batch, batch in put_ahead(((i, torch.tensor(i)) for i in range(4)), put, CPU):
        if micro_batch < 3:
            assert events[micro_batch + 1].wait(30), "the next batch has not begun"
        assert begun == [*range(min(micro_batch + 2, 4))], "more than one batch ahead"
        found.append((micro_batch, batch["doubled"].item()))
    assert found == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert [*put_ahead([], put, CPU)] == []


def test_an_error_in_the_thread_is_raised_at_its_batch_and_a_loop_may_end_early():
    def put(micro_batch, batch, device):
        if micro_batch == 2:
            raise ValueError("the third")
        return {}

    batches = put_ahead(((i, None) for i in range(9)), put, CPU)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(batches)
    unfinished = put_ahead(((i, None) for i in range(2)), put, CPU)
    next(unfinished)
    unfinished.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
