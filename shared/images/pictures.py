"""A picture with its caption, for the end of curves.png."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Picture:
    """An image of the data, as uint8 [height, width, 3], the class it was taken for, and the one it is of.

    `aspect` is its width over its height, as it is to be shown.
    """

    pixels: Any
    says: str
    truth: str
    aspect: float = 1.0
