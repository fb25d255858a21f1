"""The large files of a checkpoint, laid out once in shared memory: a save copies the tensors over their old values.

The memory is anonymous, so it is freed with the process, and limited only by the machine's memory (/dev/shm of a
container often has 64 MB). Its content is a file in Accelerate's format, so the process that writes it to disk does not
handle tensors.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from shared.checkpoints.writer import Image
from shared.compat import of_torch
from shared.compat.of_torch import UnknownLayout

PAGE = mmap.PAGESIZE


@dataclass
class Flat:
    """The leaves of a state dict, and its structure."""

    tensors: list[Tensor]
    floats: list[float]
    shape: list[Any]
    """Everything else: keys, kinds of leaves in order, and all values that are neither tensor nor float."""


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
    """Files laid out for the state dicts of models and optimizers, by file name; their values come with `copy`.

    Raises:
        MemoryError: there is not enough memory.
        UnknownLayout: torch or safetensors lay their files out in an unknown way, which may also raise other errors;
            the memory is freed after any error.
    """

    def __init__(self, models: dict[str, Any], optimizers: dict[str, Any]) -> None:
        sizes = [sum(t.nbytes for t in flatten(state).tensors) for state in (*models.values(), *optimizers.values())]
        needed = sum(sizes) + max(sizes, default=0)  # the file of a model exists twice for a moment
        if (free := available_memory()) < needed:
            raise MemoryError(f"{needed / 1e6:,.0f} MB of memory are needed, and {free / 1e6:,.0f} MB are free")
        self.images: dict[str, Image] = {}
        self._shapes = {name: flatten(state).shape for name, state in (models | optimizers).items()}
        self._tensors: dict[str, list[Tensor]] = {}
        self._floats: dict[str, list[int]] = {}
        self._registered: list[int] = []
        on_gpu = any(t.is_cuda for state in (*models.values(), *optimizers.values()) for t in flatten(state).tensors)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # One stream for all saves: torch has a pool of 32, and another could be NCCL's, which would wait for the copy.
        self._stream = torch.cuda.Stream() if on_gpu else None
        try:
            for name, state in models.items():
                self.images[name], self._tensors[name] = lay_out_model(state)
                self._floats[name] = []
            for name, state in optimizers.items():
                self.images[name], self._tensors[name], self._floats[name] = lay_out_optimizer(state)
            if on_gpu:
                for tensors in self._tensors.values():
                    self._register(tensors)
        except BaseException:
            self.close()
            raise

    def copy(self, states: dict[str, Any], lasting: Collection[int] = ()) -> Copy | None:
        """Start to copy the current values into memory; None if the states do not fit the layout.

        Args:
            states: the state dicts, by file name.
            lasting: addresses of tensors that do not change until `hold` of the returned `Copy`. All other tensors
                are copied when this returns, or on a GPU before any later operation in the current stream.
        """
        flat = {name: flatten(state) for name, state in states.items()}
        if any(flat[name].shape != shape for name, shape in self._shapes.items()):
            return None
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, state in flat.items():
            source = distinct(states[name]).values() if name.endswith(".safetensors") else state.tensors
            for place, tensor in zip(self._tensors[name], source, strict=True):
                places, tensors = later if of_torch.COUNTS_WRITES and tensor.data_ptr() in lasting else now
                places.append(place)
                tensors.append(tensor)
            for position, value in zip(self._floats[name], state.floats, strict=True):
                os.pwrite(self.images[name].descriptor, struct.pack(">d", value), position)
        copy_all(*now)
        return Copy(*later, self._stream or self._thread)

    def close(self) -> None:
        """Free the memory."""
        self._thread.shutdown()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._tensors.clear()
        for image in self.images.values():
            os.close(image.descriptor)
        self.images.clear()

    def _register(self, tensors: list[Tensor]) -> None:
        """Pin the memory of these tensors, so that the GPU copies into it directly; without this, copies are slower."""
        starts = [tensor.data_ptr() for tensor in tensors if tensor.nbytes]
        if starts:
            start = min(starts) // PAGE * PAGE
            end = -(-max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) // PAGE) * PAGE
            if int(torch.cuda.cudart().cudaHostRegister(start, end - start, 0)) == 0:
                self._registered.append(start)
                return
            with suppress(RuntimeError):  # CUDA reports the failure again at the next kernel: let this one take it
                torch.zeros(1, device="cuda")


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into their places; asynchronously from a CUDA device."""
    if places:
        with torch.no_grad():
            of_torch.copy(places, tensors, non_blocking=tensors[0].is_cuda)


def lay_out_model(state: dict[str, Tensor]) -> tuple[Image, list[Tensor]]:
    """model.safetensors in memory, and the place in it of each tensor of `distinct(state)`."""
    tensors = distinct(state)
    content = safetensors_bytes({name: t.detach().contiguous() for name, t in tensors.items()}, {"format": "pt"})
    with unnamed_memory() as descriptor:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        whole = torch.from_file(path_of(descriptor), shared=True, size=len(content), dtype=torch.uint8)
        parts = [tuple(start + offset for offset in header[name]["data_offsets"]) for name in tensors]
        places = [
            whole[first:last].view(tensor.dtype).view(tensor.shape)
            for (first, last), tensor in zip(parts, tensors.values(), strict=True)
        ]
        require_shared(places, descriptor, parts)
    return Image(descriptor, len(content)), places


def lay_out_optimizer(state: dict[str, Any]) -> tuple[Image, list[Tensor], list[int]]:
    """optimizer.bin in memory, and the place in it of each tensor, and the offset of each float, of the state.

    Floats, such as the learning rate, are pickled. To find their offsets, the layout is written with numbers in their
    place that occur nowhere else.
    """
    marks = [math.pi + i * 2.0**-30 for i in range(len(flatten(state).floats))]
    marked = with_floats(state, iter(marks))
    with unnamed_memory() as descriptor:
        with os.fdopen(descriptor, "r+b", closefd=False) as file:
            torch.save(marked, file)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = flatten(torch.load(path_of(descriptor), mmap=True, weights_only=True, map_location="cpu"))
        if (mapped.shape, mapped.floats) != (flatten(marked).shape, marks):
            raise UnknownLayout("torch.load does not return the state that torch.save wrote")
        records = of_torch.archive_records(descriptor)
        storages = [(start, end) for name, (start, end, _) in records.items() if "/data/" in name]
        require_shared(mapped.tensors, descriptor, storages)
        pickles = [record for name, record in records.items() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnknownLayout(f"torch's archive has {len(pickles)} records called data.pkl")
        start, end, _ = pickles[0]
        pickled = os.pread(descriptor, end - start, start)
        packed = [struct.pack(">d", mark) for mark in marks]
        if any(pickled.count(mark) != 1 for mark in packed):
            raise UnknownLayout("data.pkl of torch's archive does not hold each float once, in eight bytes")
        positions = [start + pickled.index(mark) for mark in packed]
        image = Image(descriptor, os.fstat(descriptor).st_size, list(records.values()))
    return image, mapped.tensors, positions


@contextmanager
def unnamed_memory() -> Iterator[int]:
    """The descriptor of new anonymous memory; an error inside the block frees it."""
    descriptor = os.memfd_create("checkpoint")
    try:
        yield descriptor
    except BaseException:
        os.close(descriptor)
        raise


def require_shared(places: list[Tensor], descriptor: int, parts: list[tuple[int, int]]) -> None:
    """Check, with the smallest tensor, that writing to a tensor changes the memory of `descriptor`.

    Args:
        places: the tensors.
        parts: (start, end) in the memory, of each tensor or of each tensor's storage.

    Raises:
        UnknownLayout: it does not, so each checkpoint would have the values of the first one.
    """
    parts = [(start, end - start) for start, end in parts if end > start]
    places = [place for place in places if place.nbytes]
    if not places:
        return
    shortest = min((size for _, size in parts), default=0)

    def content() -> list[bytes]:
        return [os.pread(descriptor, size, start) for start, size in parts if size == shortest]

    place = min(places, key=lambda tensor: (tensor.untyped_storage().nbytes(), tensor.nbytes))
    storage, first, before = place.untyped_storage(), place.storage_offset() * place.element_size(), content()
    byte = storage[first]
    storage[first] = 255 - byte
    reached = content() != before
    storage[first] = byte
    if not reached:
        raise UnknownLayout("writing to a tensor of the mapped file does not change the file")


def flatten(state: Any) -> Flat:
    """The leaves and the structure of a state dict, in its order."""
    flat = Flat([], [], [])

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):  # first, because nearly all are
            flat.tensors.append(value)
            flat.shape.append((value.shape, value.dtype))
        elif isinstance(value, dict):
            flat.shape.append(tuple(value))
            for part in value.values():
                walk(part)
        elif isinstance(value, list | tuple):
            flat.shape.append(len(value))
            for part in value:
                walk(part)
        elif isinstance(value, float):
            flat.floats.append(value)
            flat.shape.append("float")
        else:
            flat.shape.append(value)

    walk(state)
    return flat


def with_floats(state: Any, floats: Iterator[float]) -> Any:
    """A copy of a state dict with its floats replaced, in order."""
    if isinstance(state, dict):
        return type(state)((key, with_floats(value, floats)) for key, value in state.items())
    if isinstance(state, list | tuple):
        return type(state)(with_floats(value, floats) for value in state)
    return next(floats) if isinstance(state, float) else state


def distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state dict with one name for each group of tied tensors, because safetensors stores them once."""
    found: dict[Any, str] = {}
    for name, tensor in state.items():
        found.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.nbytes else name, name)
    return {name: state[name] for name in found.values()}


def path_of(descriptor: int) -> str:
    """A path that opens an anonymous file."""
    return f"/proc/self/fd/{descriptor}"


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
