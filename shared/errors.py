"""Messages to the user: printed lines, errors that the user can fix, and the exception of an interrupted run."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from tqdm import tqdm

from shared.disk import NO_SPACE, number_of


def say(line: str) -> None:
    """Print one line to stderr on rank 0. All processes may call this; the others print nothing."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def complain(problem: str) -> None:
    """Print a problem that does not end the run, on stderr, above a progress bar."""
    tqdm.write(problem, file=sys.stderr)


def listed(words: Sequence[object], most: int = 5) -> str:
    """The first words, at most `most`, separated by commas, and the number of further ones."""
    return ", ".join(map(str, words[:most])) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def aligned(rows: Mapping[str, object]) -> str:
    """A line for each row: its name and its value, which begins in the same column in all lines."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def count_of(number: float, noun: str, plural: str | None = None) -> str:
    """A number with its noun: "1 epoch", "1.5 epochs", "2,000 rows". `plural` is the noun plus "s" by default."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun if number == 1 else plural or noun + 's'}"


class UserError(Exception):
    """An error that the user can fix; `shared.run.command` prints it once and ends every process with exit code 2.

    The message is one line: the flag or file, its value, the problem and the fix. For our own invariants use `assert`,
    which keeps the traceback.
    """


class Preempted(Exception):
    """A signal ends the run, and its state is saved, if any; `shared.run.command` ends every process with code 143."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none: libraries add paragraphs and stacks."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def error_in_words(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)[:200]}"


@contextlib.contextmanager
def about(setting: str) -> Iterator[None]:
    """Turn the error of a library into a `UserError` of one line: the setting, and what the library says.

    Use it around the call of the library only, so that an error of our own keeps its traceback. A full disk and a lack
    of memory pass: `shared.run.command` says what helps against them.

    Args:
        setting: the flag and its value, such as "--train_file reviews.csv".

    Raises:
        UserError: see above.
    """
    try:
        yield
    except (UserError, Preempted, AssertionError, MemoryError):
        raise
    except Exception as error:
        out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, which this module does not import
        if out_of_memory or number_of(error) in NO_SPACE:
            raise
        raise UserError(f"{setting}: {first_line(error)}") from error
