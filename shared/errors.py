"""What is said to the user: a line that tells, a mistake that can be mended, or a signal that ended the run."""

import os
import sys
from collections.abc import Sequence


def say(line: str) -> None:
    """Print one line to stderr. Every process comes here, and only the one of rank 0 speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def listed(words: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    return ", ".join(words[:5]) + (f" and {len(words) - 5:,} more" if len(words) > 5 else "")


class UserError(Exception):
    """A mistake that the user can mend; `launch.run` prints its message once and ends every process with exit code 2.

    Raise it with one line: the flag or file, the value it had, and what to do about it. Broken invariants of our own
    are `assert`s instead, and keep their traceback.
    """


class Preempted(Exception):
    """A signal asked the run to end, and all is saved; `launch.run` ends every process with exit code 143."""
