"""The settings that all image recipes share, in addition to those of `Options`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.config.options import Options


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """Settings of the images and the classifier."""

    # Data
    train_dir: str | None = None
    """Your own training images: a folder with a subfolder for each class."""
    validation_dir: str | None = None
    """Validation images for --train_dir. None: --validation_split_percentage of the training images."""
    image_column_name: str = "image"
    """Image column of --dataset_name or --train_file. It contains bytes, or paths relative to the file's folder."""
    label_column_name: str = "label"
    """Class column of --dataset_name or --train_file."""
    skip_corrupt_images: bool = False
    """Decode all images before the run; skip and list those that cannot be decoded."""
    cache: Literal["none", "uint8"] = "none"
    """uint8: decode each image once per machine, and store it uncompressed in a memory map."""

    # Model
    model_name_or_path: str | None = None
    """Image classifier on the Hub or in a local folder. None: a new ResNet with the sizes below."""
    from_scratch: bool = False
    """Use the config of --model_name_or_path with new weights."""
    freeze_backbone: bool = False
    """Train only the classification head; all other weights keep their pretrained values."""
    embedding_size: int = 16
    """Channels of a new ResNet's first convolution."""
    hidden_sizes: tuple[int, ...] = (32, 64)
    """Channels of the stages of a new ResNet."""
    depths: tuple[int, ...] = (1, 1)
    """Number of blocks in the stages of a new ResNet."""
    layer_type: Literal["basic", "bottleneck"] = "basic"
    """Kind of blocks of a new ResNet."""
    zero_init_last_norm: bool = True
    """Initialize each residual block of a new ResNet as the identity."""

    # Precision
    cudnn_benchmark: bool = False
    """cuDNN times its algorithms for each convolution and uses the fastest. Needs a GPU; rounding can change."""

    SIZES_OF_NEW_MODELS: ClassVar = frozenset({"embedding_size", "hidden_sizes", "depths", "layer_type"})
    NEEDS: ClassVar = (
        *Options.NEEDS,
        ("validation_dir", "train_dir"),
        ("from_scratch", "model_name_or_path"),
        ("freeze_backbone", "model_name_or_path"),
    )
