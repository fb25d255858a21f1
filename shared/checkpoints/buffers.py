"""This process's share of the large files of a checkpoint in memory: a save copies the tensors over their old values.

The memory is anonymous, so it is freed with the process, and limited only by the machine's memory (/dev/shm of a
container often has 64 MB). Its content is a file in Accelerate's format, so the process that writes it to disk does not
handle tensors. Where other processes write parts of the file, the memory has holes.
"""

import mmap
import os
import struct
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from shared.checkpoints import digests
from shared.checkpoints.files import Image
from shared.checkpoints.layout import Layout, distinct, flatten, path_of
from shared.compat import of_torch
from shared.compat.of_torch import UnknownLayout

PAGE = mmap.PAGESIZE
Values = dict[str, tuple[list[Tensor], list[float]]]
"""Tensors and floats, by file name."""


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


class Buffers:
    """The memory of this process's share of the files of a checkpoint; the values come with `copy`.

    Args:
        layouts: the layouts of all files, by name; of a model, the name ends in ".safetensors".
        share: the parts of each file that this process writes, as `layout.divide` returns them; None: all.
        on_gpu: whether tensors are on a GPU, so that memory is pinned.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, layouts: dict[str, Layout], share: dict[str, list[int]] | None = None, on_gpu: bool = False):
        require_memory(sum(layout.size for layout in layouts.values()))
        self.layouts = layouts
        self.images: dict[str, Image] = {}
        self._tensors: dict[str, dict[int, Tensor]] = {}
        self._registered: list[int] = []
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # One stream for all saves: torch has a pool of 32, and another could be NCCL's, which would wait for the copy.
        self._stream = torch.cuda.Stream() if on_gpu else None
        try:
            for name, layout in layouts.items():
                part = share[name] if share is not None else None
                image = Image(os.memfd_create("checkpoint"), layout.size, layout.records, part)
                self.images[name] = image
                self._tensors[name] = tensors_in(image, layout)
            if on_gpu:
                self._register()
        except BaseException:
            self.close()
            raise

    def values_of(self, states: dict[str, Any]) -> Values | None:
        """The values of state dicts, by file name, in the order of their layouts; None if they do not fit them."""
        if states.keys() != self.layouts.keys():
            return None
        values = {}
        for name, state in states.items():
            flat = flatten(state)
            if flat.shape != self.layouts[name].shape:
                return None
            tensors = list(distinct(state).values()) if name.endswith(".safetensors") else flat.tensors
            values[name] = tensors, flat.floats
        return values

    def copy(self, values: Values, lasting: Collection[int] = ()) -> Copy:
        """Start to copy this process's share of values into memory.

        Args:
            values: as `values_of` returns them.
            lasting: addresses of tensors that do not change until `hold` of the returned `Copy`. All other tensors
                are copied when this returns, or on a GPU before any later operation in the current stream.
        """
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, (sources, floats) in values.items():
            for index, place in self._tensors[name].items():
                places, tensors = later if of_torch.COUNTS_WRITES and sources[index].data_ptr() in lasting else now
                places.append(place)
                tensors.append(sources[index])
            for position, value in zip(self.layouts[name].floats, floats, strict=True):
                os.pwrite(self.images[name].descriptor, struct.pack(">d", value), position)
        copy_all(*now)
        return Copy(*later, self._stream or self._thread)

    def close(self) -> None:
        """Free the memory."""
        self._thread.shutdown()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._tensors.clear()
        for image in self.images.values():
            os.close(image.descriptor)
        self.images.clear()

    def _register(self) -> None:
        """Pin the memory of the tensors, so that the GPU copies into it directly; without this, copies are slower."""
        runs: list[list[int]] = []  # (start, end) of consecutive pages of one mapping
        for tensors in self._tensors.values():
            first = len(runs)
            pages = [
                (t.data_ptr() // PAGE * PAGE, -(-(t.data_ptr() + t.nbytes) // PAGE) * PAGE)
                for t in tensors.values()
                if t.nbytes
            ]
            for start, end in sorted(pages):
                if len(runs) > first and start <= runs[-1][1]:
                    runs[-1][1] = max(runs[-1][1], end)
                else:
                    runs.append([start, end])
        for start, end in runs:
            if int(torch.cuda.cudart().cudaHostRegister(start, end - start, 0)) == 0:
                self._registered.append(start)
            else:
                with suppress(RuntimeError):  # CUDA reports the failure again at the next kernel: let this one take it
                    torch.zeros(1, device="cuda")


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into their places; asynchronously from a CUDA device."""
    if places:
        with torch.no_grad():
            of_torch.copy(places, tensors, non_blocking=tensors[0].is_cuda)


def tensors_in(image: Image, layout: Layout) -> dict[int, Tensor]:
    """Give the memory of an image its size and its fixed bytes; the tensors in its parts, by index in the layout.

    Pages outside these parts are never written, so they take no memory.

    Raises:
        UnknownLayout: writing to a tensor does not change the image, so each checkpoint would have the same values.
    """
    os.truncate(image.descriptor, image.size)
    for offset, content in layout.fixed:
        os.pwrite(image.descriptor, content, offset)
    whole = torch.from_file(path_of(image.descriptor), shared=True, size=image.size, dtype=torch.uint8)
    mine = {
        index: place
        for index, place in enumerate(layout.places)
        if any(digests.overlaps(part, place.extent) for part in image.parts)
    }
    tensors = {}
    for index, place in mine.items():
        length = sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True)) + 1
        length = length * place.dtype.itemsize if place.shape.numel() else 0
        values = whole[place.start : place.start + length].view(place.dtype)
        tensors[index] = values.as_strided(place.shape, place.stride)
    if start := next((place.start for place in mine.values() if place.shape.numel()), None):
        whole[start] = 1
        if os.pread(image.descriptor, 1, start) != b"\x01":
            raise UnknownLayout("writing to a tensor of the mapped memory does not change the memory")
    return tensors


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
