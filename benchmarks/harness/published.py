"""Published figures that predict_gpus.py uses, each with its source: the speed of links, and how training scaled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.scaling_model import Network

EXAMPLES = "github.com/NVIDIA/DeepLearningExamples (2024-04-04)"
NCCL = "github.com/NVIDIA/nccl, src/graph/tuning.cc"
MESSAGE, NET_MESSAGE, TREE_MESSAGE = 3.4e-6, 9.6e-6, 50e-6  # seconds
H100_LINK, NDR_CARD, HUNDRED_GIGABIT = 370e9, 47e9, 12.2e9  # bytes per second
A100_LINK, A100_CARDS, A100_MEMORY = 235e9, 192e9, 2039e9
INFINIBAND = Network(8 * NDR_CARD, NET_MESSAGE, TREE_MESSAGE, 8, MESSAGE, H100_LINK)
ETHERNET = replace(INFINIBAND, bandwidth=HUNDRED_GIGABIT)
DGX_A100 = Network(A100_CARDS, NET_MESSAGE, TREE_MESSAGE, 8, MESSAGE, A100_LINK)
SOURCES = [  # figure, value, source
    ("H100, NVLink, bus bandwidth per GPU", "370 GB/s", "NCCL's maintainer, github.com/NVIDIA/nccl-tests/issues/212"),
    ("eight InfiniBand cards of 400 Gbit/s per machine", "8 x 47 GB/s", "46 to 48 each: nccl-tests/issues/290"),
    (
        "one Ethernet card of 100 Gbit/s per machine",
        "12.2 GB/s",
        "NCCL's maintainer, nccl-tests/issues/29: the best of any card of that speed; TCP reaches less",
    ),
    ("DGX A100, NVLink, bus bandwidth per GPU", "235 GB/s", f"{NCCL}; measured: 232.5 (nccl-tests/issues/175)"),
    ("DGX A100, eight InfiniBand cards of 200 Gbit/s", "192 GB/s", "measured, github.com/NVIDIA/nccl/issues/812"),
    ("a message over NVLink, in a ring", "3.4 µs", NCCL),
    ("a message between machines, in a ring", "9.6 µs", f"{NCCL}; assumed to hold for Ethernet"),
    ("a message between two levels of a tree", "50 µs", f"{NCCL}; assumed to hold for Ethernet"),
    ("A100 80 GB, memory", "2,039 GB/s", "its datasheet; 0.87 of it are assumed, as measured on the H100"),
]


@dataclass(frozen=True)
class Run:
    """A row of a published table."""

    gpus: int
    rate: float
    """Samples per second of all GPUs."""
    micro_batches: int = 1
    """Per step and GPU."""


@dataclass(frozen=True)
class Scaling:
    """A published table, and what the model needs to predict it from its first row."""

    about: str
    source: str
    samples: int
    """Of a micro-batch."""
    gradient_bytes: float
    runs: Sequence[Run]
    overlap: bool = False
    """Whether all-reduces overlap with the backward pass."""
    update_bytes: float = 0.0
    """Memory that an update reads and writes; 0 in a table whose rows all update after one micro-batch."""
    difference: str = ""
    """Why prediction and table differ by more than 5 %."""


# BERT-large's 336.2 M gradients are sent in fp16, in one bucket after the last backward pass: run_pretraining.py sets
# bucket_cap_mb to the memory of the GPU. LAMB (lamb_amp_opt/csrc) reads and writes per parameter: norm of the gradients
# 2 bytes; first stage 14 read, 10 written; norms of parameters and updates 6; second stage 8 read, 6 written.
LARGE, LAMB = 336.2e6, 46
PYTORCH = f"{EXAMPLES}, PyTorch/LanguageModeling/BERT/README.md"
TENSORFLOW = f"{EXAMPLES}, TensorFlow2/LanguageModeling/BERT/README.md"


def bert_large(about: str, source: str, samples: int, runs: Sequence[Run], difference: str = "") -> Scaling:
    """A table of BERT-large in mixed precision on DGX A100."""
    return Scaling(about, source, samples, 2 * LARGE, runs, False, LAMB * LARGE, difference)


RESNET = 25.56e6  # parameters
TABLES = [
    bert_large("BERT-large, 128 tokens", PYTORCH, 256, [Run(1, 580, 32), Run(8, 4591, 32)]),
    bert_large(
        "BERT-large, 128 tokens, 65,536 per step",
        PYTORCH,
        256,
        [
            *[Run(8, 4553, 32), Run(16, 9191, 16), Run(32, 18119, 8)],
            *[Run(64, 35774, 4), Run(128, 70555, 2), Run(256, 138294, 1)],
        ],
    ),
    bert_large("BERT-large, 512 tokens", PYTORCH, 32, [Run(1, 210, 128), Run(8, 1657, 128)]),
    bert_large(
        "BERT-large, 512 tokens, 32,768 per step",
        PYTORCH,
        32,
        [
            *[Run(8, 1648, 128), Run(16, 3291, 64), Run(32, 6464, 32)],
            *[Run(64, 13005, 16), Run(128, 25570, 8), Run(256, 49663, 4)],
        ],
    ),
    bert_large(
        "BERT-large, TensorFlow, 128 tokens, 79,872 per step",
        TENSORFLOW,
        312,
        [Run(8, 3803.82, 32), Run(16, 7551.37, 16), Run(64, 29711.11, 4), Run(256, 110280.73, 1)],
        "not explained. With PyTorch, BERT-large reached 94.9 % on as many GPUs, and NVIDIA does not publish where the "
        "time goes",
    ),
    Scaling(
        "ResNet-50, MXNet, 512 images per GPU",
        f"{EXAMPLES}, MxNet/Classification/RN50v1.5/README.md",
        512,
        2 * RESNET,
        [Run(1, 3410.52), Run(4, 13442.66), Run(8, 26673.72)],
        overlap=True,
    ),
    Scaling(
        "ResNet-50, PyTorch, TF32, 256 images per GPU",
        f"{EXAMPLES}, PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
        256,
        4 * RESNET,
        [Run(1, 938), Run(8, 7248)],
        overlap=True,
    ),
    Scaling(
        "ResNet-50, PyTorch, mixed precision, 256 images per GPU",
        f"{EXAMPLES}, PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
        256,
        4 * RESNET,
        [Run(1, 2470), Run(8, 16621)],
        overlap=True,
        difference="the likely reason is the input of data, which the model leaves out. TF32 sends the same gradients "
        "and reached 96.6 %, but reads 7,248 JPEGs per second instead of 16,621",
    ),
]
