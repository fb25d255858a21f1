"""One image, however it was stored, as a square of RGB bytes; the only place where Pillow decodes."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Pixels = np.ndarray  # uint8 [side, side, 3]


class CorruptImage(Exception):
    """Bytes that are no image, or only the beginning of one; says what the decoder said."""


def decode(stored: bytes | Path, size: int) -> tuple[Pixels, float]:
    """The image in `stored`, upright and in RGB, scaled to a square of `size` (bilinear): (pixels, width over height).

    The whole image is squeezed into the square, so that crops can later be taken anywhere. A JPEG is decoded at 1/2,
    1/4 or 1/8 where that is still twice `size`, which is most of the time saved.

    Raises:
        CorruptImage: it cannot be decoded to its end.
    """
    try:
        with Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored) as image:
            image.draft(None, (2 * size, 2 * size))
            upright = ImageOps.exif_transpose(image)
            aspect = upright.width / upright.height
            square = to_rgb(upright).resize((size, size), Image.Resampling.BILINEAR)
    except UnidentifiedImageError:
        raise CorruptImage("no image of a known format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # all of them, for broken files
        raise CorruptImage(str(error).partition("\n")[0] or type(error).__name__) from None
    return np.asarray(square), aspect


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB: transparency on white, as transformers' image processors do it, and 16 bits scaled to 8, not cut."""
    if image.mode.startswith("I;16") or image.mode == "I":
        deep = np.asarray(image).astype(np.int64)
        image = Image.fromarray((deep >> 8 if deep.max() > 255 or image.mode != "I" else deep).astype(np.uint8))
    elif image.mode == "F":
        deep = np.nan_to_num(np.asarray(image))
        image = Image.fromarray((deep * 255 if deep.max() <= 1 else deep).clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
