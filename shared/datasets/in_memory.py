"""A data set of tensors in memory, with what a run asks of its data."""

from hashlib import blake2b

import numpy as np
from torch.utils.data import TensorDataset


class InMemory(TensorDataset):
    """Tensors [N, ...] whose items of one index belong to one sample."""

    draws_random = False

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: all samples are of one size."""
        return np.ones(len(self), np.int64)

    def digest(self) -> str:
        """A function of the content: a resumed run compares it."""
        content = blake2b(digest_size=16)
        for tensor in self.tensors:
            content.update(f"{tensor.dtype}{[*tensor.shape]}".encode())
            content.update(np.ascontiguousarray(tensor.numpy(force=True)).view(np.uint8).data)
        return content.hexdigest()
