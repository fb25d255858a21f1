"""A picture with its caption, shown at the bottom of curves.png."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Picture:
    """An image uint8 [height, width, 3], its predicted class (`says`) and its true class.

    `aspect` is the width / height with which it is drawn.
    """

    pixels: Any
    says: str
    truth: str
    aspect: float = 1.0
