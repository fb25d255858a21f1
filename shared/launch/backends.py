"""Settings of torch that hold for the whole process: determinism, TF32 and cuDNN's attention."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_backends(deterministic: bool) -> None:
    """Set how torch computes on a GPU; with --deterministic, without TF32 and only by deterministic kernels.

    cuDNN's attention is off, because it plans anew for each shape, and some of its versions give NaN gradients with a
    mask (pytorch#196678).
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    else:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute matrix products of float32 in float32: TF32 keeps three decimal digits. Also a decorator."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
