"""The image geometry of a model: size of the input, center crop and normalization."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Size, crop and normalization of a model's images, in the evaluation and in the exported image processor."""

    size: int  # side of the model's input
    resize: int | None  # shorter side before the center crop; None: the whole image is squeezed to `size`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @property
    def whole_size(self) -> int:
        """Side of the square that holds the whole image before the center crop."""
        return self.resize or self.size

    @property
    def center_share(self) -> float | None:
        """Share of the shorter side that the center crop keeps; None: no crop."""
        return None if self.resize is None else self.size / self.resize
