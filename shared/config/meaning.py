"""What a setting means for a run and its resumption, in the type of its field: `Annotated[str, Meaning.NOT_IN_RESULT]`.

A field without a meaning in its type affects the result: a resumed run must have the same value.
"""

import enum
import typing


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
