"""The seeds of the random numbers of a step."""

import torch

from shared.plan import draws


def test_dropout_depends_on_seed_step_and_micro_batch_and_not_on_earlier_draws():
    def draw(*words):
        draws.seed_dropout(torch.device("cpu"), *words)
        return torch.rand(3).tolist()

    first = draw(0, 1, 2)
    others = [draw(1, 1, 2), draw(0, 2, 2), draw(0, 1, 3), draw(0, 2, 1)]
    assert first not in others
    assert draw(0, 1, 2) == first
