"""What a model's images are: their size, how they are cut out, and their normalization."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """What a model's images are: how the evaluation cuts them, and what an exported processor does."""

    size: int  # of the model's input
    resize: int | None  # the shorter side is scaled to it before the middle is cut out; None: all is squeezed to `size`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @property
    def whole_size(self) -> int:
        """Side of the square that holds all of an image before the middle is cut out."""
        return self.resize or self.size

    @property
    def center_share(self) -> float | None:
        """Share of the shorter side that the evaluation sees."""
        return None if self.resize is None else self.size / self.resize
