"""Memory for the state of a run: a save copies the tensors over the old values while the next step is computed."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from shared.checkpoints.states import Tensors
from shared.compat import of_torch

ALIGNMENT = 64  # bytes between the starts of two tensors are a multiple of it


class Changed(Exception):
    """Tensors were changed while they were being copied, so the copy is invalid."""


class Staging:
    """A place in memory for each tensor of a state, by file and name; the values come with `copy`.

    A thread copies. On a GPU it waits for a stream of its own, so that the training continues there as well.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, files: dict[str, Tensors]) -> None:
        tensors = [tensor for of_file in files.values() for tensor in of_file.values()]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if (free := available_memory()) < sum(sizes):
            raise MemoryError(f"{sum(sizes) / 1e6:,.0f} MB of memory are needed, and {free / 1e6:,.0f} MB are free")
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self._registered = on_gpu and self._register()
        # Several threads would be a second team of OpenMP, which stays. Both teams together have more threads than
        # there are cores, so OpenMP lets them sleep at each barrier: later steps took 1.5 to 2.1 times as long.
        self._thread = ThreadPoolExecutor(1, "checkpoint", torch.set_num_threads, (1,))
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
        return shapes_of(files) == shapes_of(self.places)

    def copy(self, files: dict[str, Tensors], lasting: Collection[int] = ()) -> Future[None]:
        """Start to copy a state that fits into this memory.

        Args:
            files: its tensors, by file and name.
            lasting: addresses of tensors that do not change until the returned future is done. All other tensors are
                copied when this returns, or on a GPU before any later operation in the current stream.

        Returns:
            A future without a result. It raises `Changed` if tensors at the addresses `lasting` were changed too early.
        """
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for file, of_file in files.items():
            for name, tensor in of_file.items():
                places, tensors = later if tensor.data_ptr() in lasting else now
                places.append(self.places[file][name])
                tensors.append(tensor.detach())
        copy_all(*now)
        if self._stream:  # it goes on when the GPU has done what is due now
            self._stream.wait_stream(torch.cuda.current_stream())
        return self._thread.submit(self._copy_later, *later, of_torch.write_counts(later[1]))

    def _copy_later(self, places: list[Tensor], tensors: list[Tensor], counts: list[int]) -> None:
        """Copy tensors whose writes were counted before."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            copy_all(places, tensors)
        if self._stream:
            self._stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # leaves the core to the training
        if of_torch.write_counts(tensors) != counts:
            raise Changed("code other than an optimizer step changed parameters while they were being copied")

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


def shapes_of(files: dict[str, Tensors]) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """Shapes and dtypes, by file and name."""
    return {file: {name: (t.shape, t.dtype) for name, t in of_file.items()} for file, of_file in files.items()}


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into their places; asynchronously from a CUDA device."""
    if places:
        with torch.no_grad():
            of_torch.copy(places, tensors, non_blocking=tensors[0].is_cuda)


def available_memory() -> int:
    """Bytes of free memory, on the machine and within the limits of the control groups of this process."""
    free, groups, own = psutil.virtual_memory().available, Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        for version, limit, used in (("", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")):
            folder = groups / version / line.split(":", 2)[2].strip("/")
            for group in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # the other version, not a group, or "max" (no limit)
                    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    files = int(lines["inactive_file"]) + int(lines["active_file"])  # page cache, can be reclaimed
                    most, taken = (int((group / f"memory.{name}").read_text()) for name in (limit, used))
                    free = min(free, most - taken + files)
    return free
