"""Numbers with their nouns, and errors of libraries, as messages print them."""

import errno

import pytest
import torch

from shared.errors import UserError, about, count_of


def test_a_noun_is_singular_after_one_only():
    numbers = (1, 1.0, 1.5, 2, 2000)
    assert [count_of(n, "row") for n in numbers] == ["1 row", "1 row", "1.5 rows", "2 rows", "2,000 rows"]
    assert [count_of(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]


def test_the_error_of_a_library_becomes_one_line_with_the_setting():
    with pytest.raises(UserError, match=r"^--train_file a\.csv: CSV parse error$"), about("--train_file a.csv"):
        raise ValueError("\nCSV parse error\nat line 3")


@pytest.mark.parametrize(
    "error",
    [UserError("ours"), OSError(errno.ENOSPC, "full"), MemoryError(), torch.OutOfMemoryError(), AssertionError()],
)
def test_our_own_errors_and_lack_of_space_or_memory_pass(error):
    with pytest.raises(type(error)) as caught, about("--train_file a.csv"):
        raise error
    assert caught.value is error
