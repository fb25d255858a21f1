"""Numbers with their nouns, and errors of libraries, as messages print them."""

import errno

import pytest

from shared.errors import UserError, about, count_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, "row"), "1 row"),
        ((2000, "row"), "2,000 rows"),
        ((1.0, "epoch"), "1 epoch"),
        ((1.5, "epoch"), "1.5 epochs"),
        ((1, "process", "processes"), "1 process"),
        ((2, "process", "processes"), "2 processes"),
    ],
)
def test_a_noun_is_singular_after_one_only(given, expected):
    assert count_of(*given) == expected


def test_the_error_of_a_library_becomes_one_line_with_the_setting():
    with pytest.raises(UserError, match=r"^--train_file a\.csv: CSV parse error$"), about("--train_file a.csv"):
        raise ValueError("\nCSV parse error\nat line 3")


@pytest.mark.parametrize("error", [UserError("ours"), OSError(errno.ENOSPC, "full"), MemoryError(), AssertionError()])
def test_our_own_errors_and_lack_of_space_or_memory_pass(error):
    with pytest.raises(type(error)) as caught, about("--train_file a.csv"):
        raise error
    assert caught.value is error
