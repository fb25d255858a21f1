"""Memory for the state of a run: a save copies the tensors over the old values while the next step is computed."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from shared.checkpoints.states import Tensors
from shared.compat import of_torch

ALIGNMENT = 64  # bytes between the starts of two tensors are a multiple of it


class Copy:
    """A copy of tensors into memory under way, by a thread or by a CUDA stream.

    Args:
        places: the destinations, one tensor for each of `tensors`.
        tensors: the sources; they must not change before `hold` was called.
        by: a thread to copy from the host, or a stream of the GPU to copy from.
    """

    def __init__(self, places: list[Tensor], tensors: list[Tensor], by: ThreadPoolExecutor | torch.cuda.Stream) -> None:
        self.tensors, self.versions = tensors, of_torch.write_counts(tensors)
        self.unchanged: bool | None = None  # known after `hold`
        self.event: torch.cuda.Event | None = None
        if isinstance(by, ThreadPoolExecutor):
            self.future: Future[None] = by.submit(copy_all, places, tensors)
            return
        by.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(by):
            copy_all(places, tensors)
            self.event = by.record_event()

    def hold(self) -> None:
        """Call it before the tensors are changed; changes after the call do not affect the copy."""
        if self.unchanged is not None:
            return
        if self.event:
            torch.cuda.current_stream().wait_event(self.event)  # the host does not wait
        else:
            self.future.result()
        self.unchanged = self.versions == of_torch.write_counts(self.tensors)

    def done(self) -> bool:
        """Whether `wait` would return immediately."""
        return self.event.query() if self.event else self.future.done()

    def wait(self) -> bool:
        """Wait for the copy to complete; False if tensors were changed too early, which makes the copy invalid."""
        self.hold()
        if self.event:
            self.event.synchronize()
        return bool(self.unchanged)


class Staging:
    """A place in memory for each tensor of a state, by file and name; the values come with `copy`.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, files: dict[str, Tensors]) -> None:
        tensors = [tensor for of_file in files.values() for tensor in of_file.values()]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        require_memory(sum(sizes))
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self._registered = on_gpu and self._register()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # One stream for all saves: torch has a pool of 32, and another could be NCCL's, which would wait for the copy.
        self._stream = torch.cuda.Stream() if on_gpu else None
        parts = iter(self._memory.split(sizes))
        self.places = {
            file: {
                name: next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for name, tensor in of_file.items()
            }
            for file, of_file in files.items()
        }

    def fits(self, files: dict[str, Tensors]) -> bool:
        """Whether a state has the files, names, shapes and dtypes of this memory."""
        return described(files) == described(self.places)

    def copy(self, files: dict[str, Tensors], lasting: Collection[int] = ()) -> Copy:
        """Start to copy a state that fits into this memory.

        Args:
            files: its tensors, by file and name.
            lasting: addresses of tensors that do not change until `hold` of the returned `Copy`. All other tensors
                are copied when this returns, or on a GPU before any later operation in the current stream.
        """
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for file, of_file in files.items():
            for name, tensor in of_file.items():
                places, tensors = later if of_torch.COUNTS_WRITES and tensor.data_ptr() in lasting else now
                places.append(self.places[file][name])
                tensors.append(tensor.detach())
        copy_all(*now)
        return Copy(*later, self._stream or self._thread)

    def close(self) -> None:
        """Free the memory."""
        self._thread.shutdown()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self.places.clear()
        del self._memory

    def _register(self) -> bool:
        """Pin the memory, so that the GPU copies into it directly; without this, copies are slower."""
        if int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA reports the failure again at the next kernel: let this one take it
            torch.zeros(1, device="cuda")
        return False


def described(files: dict[str, Tensors]) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """Shapes and dtypes, by file and name."""
    return {file: {name: (t.shape, t.dtype) for name, t in of_file.items()} for file, of_file in files.items()}


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into their places; asynchronously from a CUDA device."""
    if places:
        with torch.no_grad():
            of_torch.copy(places, tensors, non_blocking=tensors[0].is_cuda)


def require_memory(needed: int) -> None:
    """Raise MemoryError when less than `needed` bytes of memory are free."""
    if (free := available_memory()) < needed:
        raise MemoryError(f"{needed / 1e6:,.0f} MB of memory are needed, and {free / 1e6:,.0f} MB are free")


def available_memory() -> int:
    """Bytes of free memory, on the machine and within the limit of its container."""
    free = psutil.virtual_memory().available
    groups = Path("/sys/fs/cgroup")
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with suppress(OSError, ValueError):  # another version of cgroups, or "max" (no limit)
            lines = dict(line.split() for line in (groups / statistics).read_text().splitlines())
            files = int(lines["inactive_file"]) + int(lines["active_file"])  # page cache, which can be reclaimed
            free = min(free, int((groups / limit).read_text()) - int((groups / used).read_text()) + files)
    return free
