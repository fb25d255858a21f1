"""The limits of a number, written into the type of its field: `rate: Annotated[float, Limits(above=0)]`."""

import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

LARGEST = 2**31 - 1  # of whole numbers: beyond, NumPy and torch would wrap around


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value, each with (`least`, `most`) or without (`above`, `below`) the limit."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` is within them."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """In words, behind "must be"."""
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)


Share = Annotated[float, Limits(least=0, most=1)]
CanBeZero = Annotated[int, Limits(least=0)]


@cache
def limits_of(config_class: type) -> dict[str, Limits]:
    """The limits of a class's fields, by name, if there are any; a subclass that sets another default keeps them."""
    found: dict[str, Limits] = {}
    for each in reversed(config_class.__mro__):
        hints = typing.get_type_hints(each, include_extras=True)
        found |= {name: limits for name, hint in hints.items() if (limits := _written(hint))}
    return found


def problem_with(value: float, limits: Limits | None) -> str | None:
    """What is wrong with a number, behind its flag; without limits, a whole one counts and another one is a size."""
    if isinstance(value, int) and value > LARGEST:
        return f"must be at most {LARGEST}"
    limits = limits or Limits(least=1 if isinstance(value, int) else 0)
    return None if limits.hold(value) else f"must be {limits}"


def _written(hint: Any) -> Limits | None:
    """The first limits in a type, however deep: in X | None, in tuple[X, ...]."""
    if isinstance(hint, Limits):
        return hint
    return next(filter(None, map(_written, typing.get_args(hint))), None)
