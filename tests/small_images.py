"""Images of a few pixels, encoded, in folders and in tables, for tests."""

import io
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from PIL import Image

from shared.augmentation.augmentation import AugmentationOptions
from shared.images.decoding import Geometry

RED, GREEN, BLUE, GREY = (250, 10, 20), (10, 240, 30), (20, 30, 230), (128, 128, 128)
EIGHT = Geometry(8, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear")


def quarters(width=40, height=40):
    """Red, green, blue and grey quarters."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, GREY
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def config(**changed):
    """The settings of an image recipe, which a test can change."""
    return SimpleNamespace(**vars(AugmentationOptions()) | {"validation_split_percentage": 20} | changed)


def folders(root, classes=("cat", "dog"), count=10, corrupt=()):
    """Write class folders of PNG files; the files numbered in `corrupt` are cut off."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            content = encoded(Image.new("RGB", (20, 16), (100 * label, 10 * i, 50)))
            (root / name / f"{i}.png").write_bytes(content[:-40] if i in corrupt else content)
    return root


def tables(tmp_path, image_type="struct", rows=10):
    images = [encoded(Image.new("RGB", (8, 8), (25 * i, 0, 0))) for i in range(rows)]
    column = [{"bytes": image, "path": None} for image in images] if image_type == "struct" else images
    labels = ["odd" if i % 2 else "even" for i in range(rows)]
    several = pa.array([[b"four"]] * rows, pa.list_(pa.binary(4)))
    columns = {"image": column, "label": labels, "row": range(rows), "several": several}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "images.parquet")
    return str(tmp_path / "images.parquet")
