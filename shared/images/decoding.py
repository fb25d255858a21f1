"""One image, however it was stored, as a square of RGB bytes; the only place where Pillow decodes."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shared.errors import UserError

Pixels = np.ndarray  # uint8 [side, side, 3]
BLOCK = 4096  # bytes; three of them, and the length, tell a stored image from others
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB\x60\x82"}  # without it a file is probably cut off


class CorruptImage(Exception):
    """Bytes that are no image, or only the beginning of one; says what the decoder said."""


def decode(stored: bytes | Path, size: int, interpolation: str = "bilinear") -> tuple[Pixels, float]:
    """The image in `stored`, scaled to a square of `size`: (pixels, width over height).

    It is turned upright and made RGB as a pipeline of transformers does it. The whole image is squeezed into the
    square, so that crops can later be taken anywhere. A JPEG is decoded at 1/2, 1/4 or 1/8 where that is still twice
    `size`, which is most of the time saved.

    Raises:
        CorruptImage: it cannot be decoded to its end.
        UserError: the file cannot be read.
    """
    with opened(stored) as image:
        image.draft(None, (2 * size, 2 * size))
        upright = ImageOps.exif_transpose(image)
        aspect = upright.width / upright.height
        square = to_rgb(upright).resize((size, size), Image.Resampling[interpolation.upper()])
    return np.asarray(square), aspect


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB as `load_image` of transformers makes it, and then its image processors.

    The first drops an alpha channel and cuts values at 255. The second put white where one color is declared to be
    transparent, which Pillow remembers.
    """
    image = image.convert("RGB")
    if image.info.get("transparency") is None:
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def inspect(stored: bytes | Path) -> tuple[int, str]:
    """A fingerprint of a stored image (64 bits of its length and of three blocks), and its mode, such as "RGB".

    Only its header is read, unless its end is missing: then all of it is decoded.

    Raises:
        CorruptImage: it is no image, or cut off; its second argument is the fingerprint.
        UserError: the file cannot be read.
    """
    try:
        with io.BytesIO(stored) if isinstance(stored, bytes) else stored.open("rb", buffering=0) as file:
            length = file.seek(0, io.SEEK_END)
            state = hashlib.blake2b(str(length).encode(), digest_size=8)
            for start in (0, length // 2, max(0, length - BLOCK)):
                file.seek(start)
                state.update(block := file.read(BLOCK))
    except OSError as error:
        raise unreadable(stored, error) from None
    fingerprint = int.from_bytes(state.digest(), "little")
    try:
        if not length:
            raise CorruptImage("0 bytes")
        with opened(stored) as image:
            mode = image.mode
            if ENDINGS.get(image.format or "", b"") not in block:
                image.load()
    except CorruptImage as problem:
        raise CorruptImage(str(problem), fingerprint) from None
    return fingerprint, mode


@contextmanager
def opened(stored: bytes | Path) -> Iterator[Image.Image]:
    """Pillow's image of `stored`; whatever a broken one raises, inside the `with` too, becomes a CorruptImage."""
    try:
        with Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored) as image:
            yield image
    except UnidentifiedImageError:
        raise CorruptImage("no image of a known format") from None
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise CorruptImage(f"more than {most:,} pixels, which Pillow refuses to decode: scale it down") from None
    except MemoryError:
        raise
    except Exception as error:  # of a dozen kinds: files of other people
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(stored, error) from None
        raise CorruptImage(str(error).partition("\n")[0] or type(error).__name__) from None


def unreadable(stored: bytes | Path, error: OSError) -> UserError:
    """What to say when the disk, and not the image, is at fault: that is never taken for a corrupt image."""
    return UserError(f"the image {stored!s} cannot be read ({error.strerror}): see to its permissions, or its disk")
