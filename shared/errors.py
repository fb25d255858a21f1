"""What a user can cause ends a run with one line that names the flag or file, the value and the fix."""


class UserError(Exception):
    """A mistake that the user can mend; `launch.run` prints its message once and ends every process with exit code 2.

    Raise it with one line: the flag or file, the value it had, and what to do about it. Broken invariants of our own
    are `assert`s instead, and keep their traceback.
    """
