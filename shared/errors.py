"""How a run ends early: a mistake that the user can mend, in one line, or a signal, after a checkpoint."""


class UserError(Exception):
    """A mistake that the user can mend; `launch.run` prints its message once and ends every process with exit code 2.

    Raise it with one line: the flag or file, the value it had, and what to do about it. Broken invariants of our own
    are `assert`s instead, and keep their traceback.
    """


class Preempted(Exception):
    """A signal asked the run to end, and all is saved; `launch.run` ends every process with exit code 143."""
