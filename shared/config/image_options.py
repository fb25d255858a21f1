"""The settings that all image recipes share, beside those of `Options`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.config.options import Options


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """Where images come from, and the classifier that sees them."""

    # Data
    train_dir: str | None = None
    """Training images of your own: a folder with a subfolder for each class."""
    validation_dir: str | None = None
    """Validation images that go with --train_dir. None: --validation_split_percentage of the training images."""
    image_column_name: str = "image"
    """The column of the images in --dataset_name or --train_file: bytes, or paths from the file's folder."""
    label_column_name: str = "label"
    """The column of the classes there."""
    skip_corrupt_images: bool = False
    """Decode all images before the run, leave out those that cannot be, and list them."""
    cache: Literal["none", "uint8"] = "none"
    """uint8: decode each image once per machine into a memory map, and read from there."""

    # Model
    model_name_or_path: str | None = None
    """Image classifier on the Hub or in a local folder. None: a new ResNet of the sizes below."""
    from_scratch: bool = False
    """Take only the config of --model_name_or_path, and new weights."""
    freeze_backbone: bool = False
    """Train the classifier only, on what the pretrained model sees."""
    embedding_size: int = 16
    """Channels of a new ResNet's first convolution."""
    hidden_sizes: tuple[int, ...] = (32, 64)
    """Channels of its stages."""
    depths: tuple[int, ...] = (1, 1)
    """Blocks of its stages."""
    layer_type: Literal["basic", "bottleneck"] = "basic"
    """Kind of its blocks."""
    zero_init_last_norm: bool = True
    """Start each residual block of a new ResNet as the identity."""

    SIZES_OF_NEW_MODELS: ClassVar = frozenset({"embedding_size", "hidden_sizes", "depths", "layer_type"})
    NEVER_MATTERS: ClassVar = Options.NEVER_MATTERS | {"cache"}
    NEEDS: ClassVar = (
        *Options.NEEDS,
        ("validation_dir", "train_dir"),
        ("from_scratch", "model_name_or_path"),
        ("freeze_backbone", "model_name_or_path"),
    )
