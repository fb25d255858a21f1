"""The settings that all image recipes share, in addition to those of `MetricOptions`."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.fields import Limits, Meaning
from shared.config.options import Rule
from shared.models.batch_norm import BatchNorm
from shared.monitoring.hooks import Hook
from shared.options.data_options import MetricOptions

ONLY_ON_GPU = ("sync_batchnorm", "cudnn_benchmark")  # torch's SyncBatchNorm has no CPU kernels
BASE_BATCH = 256  # the global batch to which --learning_rate refers if --scale_learning_rate is set


@dataclass(frozen=True, kw_only=True)
class ImageOptions(MetricOptions):
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
    stochastic_depth: Annotated[float, Limits(least=0, below=1)] = 0.0
    """Probability that a sample skips the last block of a ResNet in training; earlier blocks are skipped less often."""

    # Optimization
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over the micro-batches of all processes; for micro-batches under 16. GPUs only."""
    scale_learning_rate: Literal["linear", "sqrt", "none"] = "linear"
    """How --learning_rate, given for a global batch of 256, is scaled to --global_batch_size."""

    # Precision
    cudnn_benchmark: bool = False
    """cuDNN times its algorithms for each convolution and uses the fastest. Needs a GPU; rounding can change."""

    NEEDS: ClassVar = (
        *MetricOptions.NEEDS,
        ("validation_dir", "train_dir"),
        ("from_scratch", "model_name_or_path"),
        ("freeze_backbone", "model_name_or_path"),
    )
    EXCLUDES: ClassVar = (
        *MetricOptions.EXCLUDES,
        ("train_dir", "train_file"),
        ("train_dir", "dataset_name"),
        ("freeze_backbone", "from_scratch"),
        ("cudnn_benchmark", "deterministic"),
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        *MetricOptions.RULES,
        Rule(
            lambda it: it.on_cpu and [f"--{name}" for name in ONLY_ON_GPU if getattr(it.config, name)],
            "{found[0]} needs a GPU: leave it out",
        ),
    )

    def hooks(self) -> list[Hook]:
        return [BatchNorm(), *super().hooks()]

    def default_learning_rate(self) -> float:
        """As in the base class; a new head, or a new model, has that of new weights."""
        return self.LEARNING_RATES[0] if self.from_scratch or self.freeze_backbone else super().default_learning_rate()

    def peak_learning_rate(self) -> float:
        """--learning_rate, as --scale_learning_rate scales it from a global batch of 256 to that of the run.

        linear: Goyal et al., "Accurate, Large Minibatch SGD"; sqrt: Krizhevsky, "One weird trick", kept for Adam and
        LARS.
        """
        assert self.global_batch_size is not None, "the run folder settles the global batch"
        ratio = self.global_batch_size / BASE_BATCH
        factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
        return super().peak_learning_rate() * factors[self.scale_learning_rate]
