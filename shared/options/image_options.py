"""The settings that all image recipes share, in addition to those of `DataOptions`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.fields import Meaning
from shared.options.data_options import DataOptions


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DataOptions):
    """Settings of the images and the classifier."""

    # Data
    train_dir: Annotated[str | None, Meaning.NAMES_DATA] = None
    """Your own training images: a folder with a subfolder for each class."""
    validation_dir: Annotated[str | None, Meaning.NAMES_DATA] = None
    """Validation images for --train_dir. None: --validation_split_percentage of the training images."""
    image_column_name: str = "image"
    """Image column of --dataset_name or --train_file. It contains bytes, or paths relative to the file's folder."""
    label_column_name: str = "label"
    """Class column of --dataset_name or --train_file."""
    skip_corrupt_images: bool = False
    """Decode all images before the run; skip and list those that cannot be decoded."""
    cache: Annotated[Literal["none", "uint8"], Meaning.NOT_IN_RESULT] = "none"
    """uint8: decode each image once per machine, and store it uncompressed in a memory map."""

    # Model
    model_name_or_path: Annotated[str | None, Meaning.MAY_BE_ON_HUB] = None
    """Image classifier on the Hub or in a local folder. None: a new ResNet with the sizes below."""
    revision: str | None = None
    """Branch, tag or commit of --model_name_or_path on the Hub. None: its main branch."""
    from_scratch: bool = False
    """Use the config of --model_name_or_path with new weights."""
    freeze_backbone: bool = False
    """Train only the classification head; all other weights keep their pretrained values."""
    embedding_size: Annotated[int, Meaning.SIZE_OF_NEW_MODEL] = 16
    """Channels of a new ResNet's first convolution."""
    hidden_sizes: Annotated[tuple[int, ...], Meaning.SIZE_OF_NEW_MODEL] = (32, 64)
    """Channels of the stages of a new ResNet."""
    depths: Annotated[tuple[int, ...], Meaning.SIZE_OF_NEW_MODEL] = (1, 1)
    """Number of blocks in the stages of a new ResNet."""
    layer_type: Annotated[Literal["basic", "bottleneck"], Meaning.SIZE_OF_NEW_MODEL] = "basic"
    """Kind of blocks of a new ResNet."""
    zero_init_last_norm: bool = True
    """Initialize each residual block of a new ResNet as the identity."""

    # Precision
    cudnn_benchmark: bool = False
    """cuDNN times its algorithms for each convolution and uses the fastest. Needs a GPU; rounding can change."""

    NEEDS: ClassVar = (
        *DataOptions.NEEDS,
        ("revision", "model_name_or_path"),
        ("validation_dir", "train_dir"),
        ("from_scratch", "model_name_or_path"),
        ("freeze_backbone", "model_name_or_path"),
    )
