"""The layout of the files of a checkpoint: where each tensor lies, and all bytes that belong to no tensor.

It is found once, by writing each file into memory. It is small, so that one process can send it to the others. Files
are read by their layout, too: straight into the memory of their tensors, by several threads.
"""

import io
import json
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shared.checkpoints import digests
from shared.checkpoints.files import Record, read_into
from shared.compat import of_torch
from shared.compat.of_torch import UnknownLayout


@dataclass
class Flat:
    """The leaves of a state dict, and its structure."""

    tensors: list[Tensor]
    floats: list[float]
    shape: list[Any]
    """Everything else: keys, kinds of leaves in order, and all values that are neither tensor nor float."""


@dataclass
class Place:
    """Where a tensor lies in a file."""

    start: int
    """The byte of its first element."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    extent: tuple[int, int]
    """(start, end) of the bytes of the file that depend on the tensor: its storage, and the checksum behind it."""


@dataclass
class Layout:
    """A file of `size` bytes: `places` of its tensors, `floats` of its floats, and the bytes that never change."""

    size: int
    shape: list[Any]
    """The structure of the state dict, as in `Flat`."""
    places: list[Place]
    fixed: list[tuple[int, bytes]]
    """(offset, content) of everything that is no tensor."""
    floats: list[int] = field(default_factory=list)
    """The offset of each float."""
    records: list[Record] = field(default_factory=list)
    """The records of a zip archive, whose checksums change with the tensors."""

    @property
    def directory(self) -> int:
        """The first byte that depends on all parts of the file: a zip archive repeats all checksums at its end."""
        return min((repeated for _, _, (_, repeated) in self.records), default=self.size)


def lay_out(models: dict[str, Any], archives: dict[str, Any]) -> dict[str, Layout]:
    """The layouts of files, by name.

    Args:
        models: the state dicts that safetensors writes, by file name.
        archives: the state dicts that torch.save writes, by file name.

    Raises:
        UnknownLayout: torch or safetensors lay their files out in an unknown way, which may also raise other errors.
    """
    return {name: lay_out_model(state) for name, state in models.items()} | {
        name: lay_out_archive(state) for name, state in archives.items()
    }


def divide(layouts: dict[str, Layout], processes: int) -> list[dict[str, list[int]]]:
    """The parts of each file that each process writes, by file name.

    The leader is the first process. It writes files of one part, and the end of each file that depends on the other
    parts. All processes get about the same number of parts.

    Args:
        layouts: the layouts of all files, by name.
        processes: their number.
    """
    shares: list[dict[str, list[int]]] = [{name: [] for name in layouts} for _ in range(processes)]
    parts = [(name, part) for name, layout in layouts.items() for part in range(len(digests.parts_of(layout.size)))]
    for i, (name, part) in enumerate(parts):
        layout = layouts[name]
        leads = layout.size <= digests.PART or digests.overlaps(part, (layout.directory, layout.size))
        shares[0 if leads else processes - 1 - i * processes // len(parts)][name].append(part)
    return shares


def lay_out_model(state: dict[str, Tensor]) -> Layout:
    """The layout of model.safetensors, with a place for each tensor of `distinct(state)`."""
    tensors = distinct(state)
    content = safetensors_bytes({name: t.detach().contiguous() for name, t in tensors.items()}, {"format": "pt"})
    header, start = header_of(io.BytesIO(content))
    places = []
    for name, tensor in tensors.items():
        first, last = (start + offset for offset in header[name]["data_offsets"])
        if last - first != tensor.nbytes or last > len(content):
            raise UnknownLayout(f"safetensors gives {name} {last - first} bytes instead of {tensor.nbytes}")
        stride = torch.empty(tensor.shape, device="meta").stride()
        places.append(Place(first, tensor.shape, stride, tensor.dtype, (first, last)))
    return Layout(len(content), flatten(state).shape, places, [(0, content[:start])])


def header_of(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a file of safetensors, in the format that safetensors documents, and where the tensors begin."""
    size = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(size)), 8 + size


@cache
def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in files of safetensors."""
    return header_of(io.BytesIO(safetensors_bytes({"": torch.empty(0, dtype=dtype)})))[0][""]["dtype"]


def lay_out_archive(state: Any) -> Layout:
    """The layout of a file of torch.save, with a place for each tensor, and the offset of each float, of the state.

    Floats, such as the learning rate, are pickled. To find their offsets, the layout is written with numbers in their
    place that occur nowhere else.
    """
    marks = [math.pi + i * 2.0**-30 for i in range(len(flatten(state).floats))]
    marked = with_floats(state, iter(marks))
    with unnamed_memory() as descriptor:
        with os.fdopen(descriptor, "r+b", closefd=False) as file:
            torch.save(marked, file)
        records = of_torch.archive_records(descriptor)
        mapped = flatten(torch.load(path_of(descriptor), mmap=True, weights_only=True, map_location="cpu"))
        if (mapped.shape, mapped.floats) != (flatten(marked).shape, marks):
            raise UnknownLayout("torch.load does not return the state that torch.save wrote")
        storages = sorted(record[:2] for name, record in records.items() if "/data/" in name)
        places = places_in(storages, mapped.tensors)
        pickles = [record for name, record in records.items() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnknownLayout(f"torch's archive has {len(pickles)} records called data.pkl")
        start, end, _ = pickles[0]
        pickled = os.pread(descriptor, end - start, start)
        packed = [struct.pack(">d", mark) for mark in marks]
        if any(pickled.count(mark) != 1 for mark in packed):
            raise UnknownLayout("data.pkl of torch's archive does not hold each float once, in eight bytes")
        positions = [start + pickled.index(mark) for mark in packed]
        size = os.fstat(descriptor).st_size
        gaps = zip([0, *(end for _, end in storages)], [*(start for start, _ in storages), size], strict=True)
        fixed = [(start, os.pread(descriptor, end - start, start)) for start, end in gaps]
    return Layout(size, mapped.shape, places, fixed, positions, list(records.values()))


def places_in(storages: list[tuple[int, int]], tensors: list[Tensor]) -> list[Place]:
    """The places of tensors that torch.load mapped from a file.

    Args:
        storages: (start, end) in the file of each storage that is not empty, in order.
        tensors: the tensors, in any order; several may share a storage.

    Raises:
        UnknownLayout: the tensors do not lie in memory as the storages lie in the file, so the file was not mapped.
    """
    filled = [tensor for tensor in tensors if tensor.nbytes]
    addresses = sorted({tensor.untyped_storage().data_ptr() for tensor in filled})
    origin = addresses[0] - storages[0][0] if filled and storages else 0  # the address of the file's first byte
    if [address - origin for address in addresses] != [start for start, _ in storages]:
        raise UnknownLayout("torch.load does not map the storages of torch's archive where they are")
    starts = [start for start, _ in storages]
    places = []
    for tensor in tensors:
        start, extent = 0, (0, 0)
        if tensor.nbytes:
            start = tensor.data_ptr() - origin
            first, last = storages[bisect_right(starts, start) - 1]
            if last - first != tensor.untyped_storage().nbytes():
                raise UnknownLayout("the storages in torch's archive have other sizes than those of the tensors")
            extent = first, last + of_torch.BYTES_OF_CHECKSUM
        places.append(Place(start, tensor.shape, tensor.stride(), tensor.dtype, extent))
    return places


def read_model(model: nn.Module, file: Path, may_lack: Collection[str] = ()) -> bool:
    """Read a file of safetensors straight into the parameters and buffers of a model on the CPU.

    Args:
        model: the model.
        file: the file.
        may_lack: names of parameters that need not be in the file.

    Returns:
        Whether that was possible. If not, the model is unchanged: the file does not fit it, or its state dict is not
        the memory of its parameters and buffers. Then `safetensors.torch.load_model` reads it, or finds the error.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        header, begin = header_of(stream)
    header.pop("__metadata__", None)
    state = model.state_dict()
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    if not all(
        isinstance(t, Tensor) and t.is_cpu and t.is_contiguous() and t.data_ptr() in own for t in state.values()
    ):
        return False
    written = {identity(name, state[name]) for name in header if name in state}
    lacking = {name for name, tensor in state.items() if identity(name, tensor) not in written}
    fits = all(name in state and is_entry_of(state[name], entry) for name, entry in header.items())
    if not fits or not lacking <= {*may_lack}:
        return False
    read_into(file, ((begin + entry["data_offsets"][0], memory_of(state[name])) for name, entry in header.items()))
    increment_version([state[name] for name in header])
    return True


def is_entry_of(tensor: Tensor, entry: dict[str, Any]) -> bool:
    """Whether an entry of a header of safetensors has the shape and dtype of a tensor."""
    first, last = entry.get("data_offsets", (0, 0))
    found = entry.get("shape"), entry.get("dtype"), last - first
    return found == ([*tensor.shape], name_of(tensor.dtype), tensor.nbytes)


def read_archive(file: Path) -> Any:
    """What torch.save wrote to a file, on the CPU. Only weights and plain values are unpickled.

    It equals what torch.load returns. Several threads read it; a file with an unknown layout is left to torch.load.

    Raises:
        OSError: the file cannot be read.
        RuntimeError: it is no file of torch.save.
    """
    state = torch.load(file, mmap=True, map_location="cpu", weights_only=True)  # reads the structure only
    tensors = flatten(state).tensors
    try:
        with file.open("rb") as stream:
            records = of_torch.archive_records(stream.fileno())
        storages = sorted(record[:2] for name, record in records.items() if "/data/" in name)
        places = places_in(storages, tensors)
    except UnknownLayout:
        return torch.load(file, map_location="cpu", weights_only=True)
    memory = {start: torch.empty(end - start, dtype=torch.uint8) for start, end in storages}
    read_into(file, ((start, memory_of(content)) for start, content in memory.items()))
    with torch.no_grad():
        for place, tensor in zip(places, tensors, strict=True):
            start = place.extent[0]
            storage = memory[start].untyped_storage() if tensor.nbytes else torch.UntypedStorage(0)
            tensor.set_(storage, (place.start - start) // place.dtype.itemsize, place.shape, place.stride)
    return state


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def unnamed_memory() -> Iterator[int]:
    """The descriptor of anonymous memory, which is freed at the end of the block."""
    descriptor = os.memfd_create("layout")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
        found.setdefault(identity(name, tensor), name)
    return {name: state[name] for name in found.values()}


def identity(name: str, tensor: Tensor) -> Any:
    """What tied tensors of a state dict have in common, and all others do not."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.nbytes else name


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, under all of their names."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def digest_of(tensors: Iterable[Tensor], algorithm: str = digests.ALGORITHM) -> str:
    """A digest of shapes, dtypes and values, by one of `digests.ALGORITHMS`."""
    found = digests.ALGORITHMS[algorithm]()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def path_of(descriptor: int) -> str:
    """A path that opens an anonymous file."""
    return f"/proc/self/fd/{descriptor}"
