"""The image geometry of a model: size of the input, center crop and normalization."""

from dataclasses import dataclass

from shared.images.decoding import Square


@dataclass(frozen=True)
class Geometry:
    """Size, crop and normalization of a model's images, in the evaluation and in the exported image processor."""

    size: int  # side of the model's input
    resize: int | None  # shorter side before the center crop; None: the whole image is squeezed to `size`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    def training_square(self, decode_size: int | None) -> Square:
        """The whole image, squeezed, so that training can crop anywhere. Its side is `decode_size` or `resize`."""
        return Square(decode_size or self.resize or self.size, self.interpolation)

    @property
    def evaluation_square(self) -> Square:
        """The model's input, with the pixels of the exported image processor."""
        return Square(self.size, self.interpolation, self.resize, exact=True)
