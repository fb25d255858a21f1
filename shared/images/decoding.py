"""Decode one encoded image to a square of RGB bytes. No other module decodes with Pillow."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shared.errors import UserError, about

Pixels = np.ndarray  # uint8 [side, side, 3]
BLOCK = 4096  # bytes; three blocks and the length make the fingerprint of an encoded image
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB\x60\x82"}  # a file without its format's ending is probably truncated


class CorruptImage(Exception):
    """The bytes are not an image, or are truncated; the message is the decoder's."""


@dataclass(frozen=True)
class Square:
    """The square that `decode` makes of an image."""

    size: int
    """Side in pixels."""
    interpolation: str = "bilinear"
    """"bilinear" or "bicubic"."""
    resize: int | None = None
    """Length to which the shorter side is scaled before the center is cropped. None: the whole image is squeezed."""
    exact: bool = False
    """Decode a JPEG at its full size, as a pipeline does. False: at 1/2, 1/4 or 1/8 of it if the result is still at
    least twice `size`, which saves most of the time."""

    def of(self, image: Image.Image) -> Pixels:
        """Scale an image, and crop it. The pixels are those of transformers' image processors (backend "pil")."""
        width = height = self.size
        if self.resize is not None:
            shorter = min(image.size)
            width, height = (int(self.resize * side / shorter) for side in image.size)
        scaled = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return np.asarray(scaled.crop((left, top, left + self.size, top + self.size)))


@dataclass(frozen=True)
class Geometry:
    """Size, crop and normalization of a model's images, in the evaluation and in the exported image processor."""

    size: int  # side of the model's input
    resize: int | None  # shorter side before the center crop; None: the whole image is squeezed to `size`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    def __post_init__(self) -> None:
        """Refuse a crop beyond the scaled image, whose borders would be black in evaluations and predictions only."""
        if self.resize is not None and self.resize < self.size:
            raise UserError(f"--resize_size {self.resize} is below --image_size {self.size}: raise it")

    def training_square(self, decode_size: int | None) -> Square:
        """The whole image, squeezed, so that training can crop anywhere. Its side is `decode_size` or `resize`."""
        return Square(decode_size or self.resize or self.size, self.interpolation)

    @property
    def evaluation_square(self) -> Square:
        """The model's input, with the pixels of the exported image processor."""
        return Square(self.size, self.interpolation, self.resize, exact=True)


def decode(stored: bytes | Path, square: Square) -> tuple[Pixels, float]:
    """Decode an image to a square: return (pixels, aspect ratio of the image as width / height).

    The image is rotated by its EXIF orientation and converted to RGB as in transformers' pipelines.

    Raises:
        CorruptImage: the image cannot be decoded completely.
        UserError: the file cannot be read.
    """
    with opened_image(stored) as image:
        if not square.exact:
            image.draft(None, (2 * square.size, 2 * square.size))
        upright = ImageOps.exif_transpose(image)
        aspect = upright.width / upright.height
        pixels = square.of(to_rgb(upright))
    return pixels, aspect


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB as transformers' `load_image` and then its image processors do.

    `load_image` drops an alpha channel and clips values at 255. The processors paint white where the image declares
    one color to be transparent; Pillow keeps that declaration after the conversion.
    """
    image = image.convert("RGB")
    if image.info.get("transparency") is None:
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def inspect(stored: bytes | Path, whole: bool = False) -> tuple[int, str, str]:
    """Return an encoded image's fingerprint (64-bit hash of its length and three blocks), mode ("RGB") and problem.

    Only the header is decoded, unless `whole` is True or the ending of the format is missing: then the whole image is
    decoded. The problem of an image that is corrupt is the message of `CorruptImage`; otherwise it is "".

    Raises:
        UserError: the file cannot be read.
    """
    with (
        about(f"the image {stored if isinstance(stored, Path) else ''}"),
        io.BytesIO(stored) if isinstance(stored, bytes) else stored.open("rb", buffering=0) as file,
    ):
        length = file.seek(0, io.SEEK_END)
        state = hashlib.blake2b(str(length).encode(), digest_size=8)
        for start in (0, length // 2, max(0, length - BLOCK)):
            file.seek(start)
            state.update(block := file.read(BLOCK))
    fingerprint, mode, problem = int.from_bytes(state.digest(), "little"), "", ""
    try:
        if not length:
            raise CorruptImage("0 bytes")
        with opened_image(stored) as image:
            mode = image.mode
            if ENDINGS.get(image.format or "", b"") not in block:
                image.load()
        if whole:
            decode(stored, Square(1))
    except CorruptImage as corrupt:
        problem = str(corrupt)
    return fingerprint, mode, problem


@contextmanager
def opened_image(stored: bytes | Path) -> Iterator[Image.Image]:
    """Open an image with Pillow. Any error of a broken image, also inside the `with`, becomes a CorruptImage."""
    try:
        with Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored) as image:
            yield image
    except UnidentifiedImageError:
        raise CorruptImage("no image of a known format") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises a dozen kinds of errors for broken files
        if isinstance(error, OSError) and error.errno is not None:  # not a corrupt image
            raise UserError(f"the image {stored!s:.200} cannot be read: {error.strerror}") from None
        raise CorruptImage(str(error).partition("\n")[0] or type(error).__name__) from None
