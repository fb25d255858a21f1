"""Limits of a number in the type annotation of its field: `rate: Annotated[float, Limits(above=0)]`."""

import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

LARGEST = 2**31 - 1  # largest integer: NumPy and torch would overflow above it


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, inclusive (`least`, `most`) or exclusive (`above`, `below`)."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` is within the limits."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The limits in words, to follow "must be"."""
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)


Share = Annotated[float, Limits(least=0, most=1)]
CanBeZero = Annotated[int, Limits(least=0)]


@cache
def limits_of(config_class: type) -> dict[str, Limits]:
    """The limits of the fields that have any, by name; a subclass that only changes a default inherits the limits."""
    found: dict[str, Limits] = {}
    for each in reversed(config_class.__mro__):
        hints = typing.get_type_hints(each, include_extras=True)
        found |= {name: limits for name, hint in hints.items() if (limits := _limits_in(hint))}
    return found


def problem_with(value: float, limits: Limits | None) -> str | None:
    """Describe how `value` violates its limits, or None. Without limits: integers at least 1, floats at least 0."""
    if isinstance(value, int) and value > LARGEST:
        return f"must be at most {LARGEST}"
    limits = limits or Limits(least=1 if isinstance(value, int) else 0)
    return None if limits.hold(value) else f"must be {limits}"


def _limits_in(hint: Any) -> Limits | None:
    """The first Limits in a type annotation, also inside X | None or tuple[X, ...]."""
    if isinstance(hint, Limits):
        return hint
    return next(filter(None, map(_limits_in, typing.get_args(hint))), None)
