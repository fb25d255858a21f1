"""`--image_decoder torchcodec`: JPEGs decoded on the GPU by torchcodec, which calls NVIDIA's nvJPEG.

The loader's workers only read the files. A thread of the training process decodes one micro-batch ahead, in a CUDA
stream of its own (`plan/device_transfer.py`), because torchcodec waits for the device at the end of each call.

nvJPEG's colors differ from Pillow's where a JPEG stores color at half resolution, as most photographs do. There nvJPEG
repeats each stored color, and Pillow interpolates.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.errors import UserError
from shared.images.decoding import CorruptImage, opened, unreadable

AT_ONCE = 32  # images decoded by one call; bounds the memory for images of full size
START = b"\xff\xd8\xff"  # of every JPEG
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values for images that are turned by 90 degrees
YCBCR_SAMPLING = ((1, 1), (1, 2), (2, 1), (2, 2))  # stored luminance per stored color, vertically and horizontally
FLAG = "--image_decoder torchcodec"


def require_decoder() -> None:
    """Check that this machine can decode JPEGs on a GPU.

    Raises:
        UserError: there is no GPU, or no torchcodec with a JPEG decoder.
    """
    if not torch.cuda.is_available():
        raise UserError(f"{FLAG} decodes on a GPU, and there is none: use pillow")
    try:
        load_decoder()
    except (ImportError, OSError, RuntimeError) as error:  # torchcodec cannot load its libraries, or is older
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{FLAG} needs the package torchcodec, 0.16 or later ({reason}): pip install 'torchcodec>=0.16', or use "
            "pillow"
        ) from None


def load_decoder() -> Callable[..., list[Tensor]]:
    """`torchcodec.decoders.decode_jpeg`: (encoded images, device=...) -> uint8 [3, height, width] of each, upright."""
    from torchcodec.decoders import decode_jpeg

    return decode_jpeg


def read_jpeg(stored: bytes | Path) -> tuple[bytes, float] | None:
    """Return a JPEG's bytes and its aspect ratio (width / height, upright); None if Pillow has to decode the image.

    Pillow decodes all other formats, and JPEGs that nvJPEG does not support or would decode with other colors: CMYK,
    color stored as RGB, unusual sampling of the color, and files of several images.

    Raises:
        CorruptImage: the header is broken.
        UserError: the file cannot be read.
    """
    try:
        content = stored if isinstance(stored, bytes) else stored.read_bytes()
    except OSError as error:
        raise unreadable(stored, error) from None
    if not content.startswith(START):
        return None
    with opened(content) as image:
        layers = getattr(image, "layer", [])  # (id, vertical sampling, horizontal sampling, table) of each channel
        as_rgb = image.info.get("adobe_transform") == 0 or [each[0] for each in layers] == [*b"RGB"]
        sampling, *others = [each[1:3] for each in layers] or [None]
        usual = len(layers) == 1 or (sampling in YCBCR_SAMPLING and others == [(1, 1)] * 2 and not as_rgb)
        if image.format != "JPEG" or not usual:
            return None
        width, height = image.size
        sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
    return content, height / width if sideways else width / height


def decode_jpegs(jpegs: Sequence[Tensor], size: int, interpolation: str, device: torch.device) -> list[Tensor]:
    """Decode JPEGs on the device, upright, and scale each to a square.

    Args:
        jpegs: uint8 [bytes] of each image, on the host.
        size: side of the squares, in pixels.
        interpolation: "bilinear" or "bicubic".
        device: a GPU; torchcodec also decodes on a CPU.

    Returns:
        uint8 [size, size, 3] of each image, on the device.

    Raises:
        CorruptImage: nvJPEG cannot decode an image; its second argument is the number of the image.
    """
    squares: list[Tensor] = [torch.empty(0)] * len(jpegs)
    for start in range(0, len(jpegs), AT_ONCE):
        decoded = decode(jpegs[start : start + AT_ONCE], start, device)
        of_shape: dict[torch.Size, list[int]] = {}
        for i, image in enumerate(decoded):
            of_shape.setdefault(image.shape, []).append(i)
        for alike in of_shape.values():  # fewer operators than one image at a time
            scaled = squeeze(torch.stack([decoded[i] for i in alike]), size, interpolation)
            for i, square in zip(alike, scaled.unbind(), strict=True):
                squares[start + i] = square
    return squares


def decode(jpegs: Sequence[Tensor], first: int, device: torch.device) -> list[Tensor]:
    """The images uint8 [3, height, width]; `first` is the number of the first one, for the CorruptImage."""
    try:
        return load_decoder()(list(jpegs), device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if len(jpegs) > 1:  # find the image
            return [image for i, jpeg in enumerate(jpegs, first) for image in decode([jpeg], i, device)]
        raise CorruptImage(str(error).partition("\n")[0], first) from None


def squeeze(images: Tensor, size: int, interpolation: str) -> Tensor:
    """Scale images to squares: uint8 [N, 3, height, width] -> [N, size, size, 3].

    The result is Pillow's, up to two levels of 255: Pillow also rounds between its horizontal and its vertical pass.
    """
    scaled = F.interpolate(images.float(), (size, size), mode=interpolation, antialias=True)
    return scaled.round_().clamp_(0, 255).byte().permute(0, 2, 3, 1)
