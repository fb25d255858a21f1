"""A data set of tensors in memory, with the attributes that a run requires of its data."""

from hashlib import blake2b

import numpy as np
from torch.utils.data import TensorDataset


class InMemory(TensorDataset):
    """Tensors [N, ...]; item i of each tensor belongs to sample i."""

    draws_random = False

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], all 1: samples have equal cost. They take no memory."""
        return np.broadcast_to(np.int64(1), len(self))

    def digest(self) -> str:
        """A digest of the content, which a resumed run compares with that of the interrupted run."""
        content = blake2b(digest_size=16)
        for tensor in self.tensors:
            content.update(f"{tensor.dtype}{[*tensor.shape]}".encode())
            content.update(np.ascontiguousarray(tensor.numpy(force=True)).view(np.uint8).data)
        return content.hexdigest()
