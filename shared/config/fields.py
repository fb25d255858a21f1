"""What the type of a setting says, apart from its kind: the limits of a number, and its meaning for a run."""

import enum
import math
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

LARGEST = 2**31 - 1  # largest integer: NumPy and torch would overflow above it


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, inclusive (`least`, `most`) or exclusive (`above`, `below`)."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        """Whether `value` is within the limits."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        """The limits in words, to follow "must be"."""
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if math.isfinite(limit))


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


def violation(value: float, limits: Limits | None) -> str | None:
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


class Meaning(enum.Enum):
    """What a setting affects or names. A field may have several meanings."""

    NOT_IN_RESULT = enum.auto()
    """It does not affect the result of training."""
    CHOOSES_MODEL = enum.auto()
    """It affects the result only if an evaluation selects the exported weights or ends the run."""
    MAY_GROW = enum.auto()
    """A resumed run may increase it if the schedule is constant and the warm-up is given in steps. Other schedules
    depend on the total number of steps: with another total, the steps already taken would be different."""
    MAY_DIFFER = enum.auto()
    """It may differ between the processes of a launch. All others must be equal, even those that are not in the result:
    processes that save or log at different steps would wait for each other in different collective calls."""
    NAMES_DATA = enum.auto()
    """It names data: a path, a URL, or a dataset on the Hub."""
    MAY_BE_ON_HUB = enum.auto()
    """It is a path, or a name on the Hub."""
    SIZE_OF_NEW_MODEL = enum.auto()
    """It has no effect with --model_name_or_path."""


def fields_with(config_class: type, *meanings: Meaning) -> frozenset[str]:
    """The names of the fields with one of these meanings; a subclass that only changes a default inherits them."""
    return frozenset(
        name
        for each in config_class.__mro__
        for name, hint in typing.get_type_hints(each, include_extras=True).items()
        if not set(meanings).isdisjoint(getattr(hint, "__metadata__", ()))
    )
