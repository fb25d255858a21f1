"""What a run tells its user once, however many processes it has."""

import os
import sys


def say(line: str) -> None:
    """Print what was decided for the user, on stderr: every process comes here, one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
