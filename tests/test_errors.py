"""Numbers with their nouns, as messages print them."""

import pytest

from shared.errors import count_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, "row"), "1 row"),
        ((0, "row"), "0 rows"),
        ((2000, "row"), "2,000 rows"),
        ((1.0, "epoch"), "1 epoch"),
        ((1.5, "epoch"), "1.5 epochs"),
        ((1, "process", "processes"), "1 process"),
        ((2, "process", "processes"), "2 processes"),
    ],
)
def test_a_noun_is_singular_after_one_only(given, expected):
    assert count_of(*given) == expected
