"""Writes the files of a checkpoint from memory, and reads them into memory, several parts at once.

One process writes them, or several of a machine together. One of these is the leader. It creates the files, tells the
others, writes its own parts, and waits for the reports of the others. If a process ends, its pipes close, so nobody
waits for it.
"""

import ctypes
import errno
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from mmap import MAP_SHARED, PAGESIZE, mmap
from pathlib import Path
from typing import Any

from shared.checkpoints import digests
from shared.checkpoints.digests import Line
from shared.disk import sync

LIBC = ctypes.CDLL(None)
ALIGNMENT = 4096  # bytes, of what is written directly; a file system that needs more refuses it

Record = tuple[int, int, tuple[int, int]]
"""A record of a zip archive: where its content starts and ends, and the two places of its checksum."""


Pipe = tuple[int, int]
"""Two descriptors: to read from another process, and to write to it."""
Address = tuple[int, int, int]
"""Of a pipe that another process offers: its process id, and its descriptors to read from and to write to."""


@dataclass
class Image:
    """A file laid out in memory: the descriptor and size of that memory, and, of a zip archive, its records."""

    descriptor: int
    size: int
    records: list[Record] = field(default_factory=list)
    share: list[int] | None = None
    """The parts of the file that are in this memory and written by this process; None: all."""
    checksums: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    """By part, the checksums in it, as (where the end of the archive repeats it, checksum)."""

    @cached_property
    def parts(self) -> list[int]:
        """The parts of the file that this process writes."""
        return list(range(len(digests.parts_of(self.size)))) if self.share is None else self.share

    @cached_property
    def records_by_part(self) -> dict[int, list[Record]]:
        """By part, the records with a checksum in it; a checksum may cross the border of two parts."""
        found: dict[int, list[Record]] = {}
        for record in self.records:
            place = record[2][0]
            for part in {place // digests.PART, (place + 3) // digests.PART}:
                found.setdefault(part, []).append(record)
        return found

    @cached_property
    def directory(self) -> int:
        """The first byte that depends on all parts: a zip archive repeats all checksums at its end."""
        return min((places[1] for _, _, places in self.records), default=self.size)

    @cached_property
    def memory(self) -> mmap:
        """The memory, mapped once for all saves: the first pass over a mapping takes as long as several later ones."""
        return mmap(self.descriptor, self.size, MAP_SHARED)


class Channel:
    """Messages to and from another process, as lines of JSON."""

    def __init__(self, pipe: Pipe) -> None:
        self._reading, self._writing = os.fdopen(pipe[0]), pipe[1]

    def send(self, message: Any) -> None:
        """Send a message; if the other process has ended, `receive` tells."""
        with suppress(BrokenPipeError):
            content = f"{json.dumps(message)}\n".encode()
            while content:
                content = content[os.write(self._writing, content) :]

    def receive(self) -> Any | None:
        """The next message; None if the other process has ended."""
        line = self._reading.readline()
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> None:
        """Close the pipes."""
        self._reading.close()
        os.close(self._writing)


def offer(number: int) -> tuple[list[Pipe], list[Address]]:
    """Pipes to `number` other processes of this machine, and what each of them needs to `accept` its own.

    When all have accepted, close the descriptors in the addresses.
    """
    pipes, addresses = [], []
    for _ in range(number):
        (here_in, there_out), (there_in, here_out) = os.pipe(), os.pipe()
        pipes.append((here_in, here_out))
        addresses.append((os.getpid(), there_in, there_out))
    return pipes, addresses


def accept(address: Address) -> Pipe:
    """Open the pipes that another process of the same user offers; raises OSError if that is impossible."""
    process, reading, writing = address
    here_in = os.open(f"/proc/{process}/fd/{reading}", os.O_RDONLY)
    try:
        return here_in, os.open(f"/proc/{process}/fd/{writing}", os.O_WRONLY)
    except OSError:
        os.close(here_in)
        raise


def create_files(folder: Path, images: Mapping[str, Image]) -> None:
    """Create files in `folder`, of full size and without content."""
    for name, image in images.items():
        with (folder / name).open("xb") as file:
            file.truncate(image.size)


def write_files(
    folder: Path, images: Mapping[str, Image], contents: Mapping[str, bytes], others: Sequence[Channel] = ()
) -> dict[str, Line]:
    """Write all files of a checkpoint, several parts at once; their lines of the manifest.

    Args:
        folder: where `create_files` has created the files of `images`.
        images: the large files, by name.
        contents: the small files, by name.
        others: channels to the processes that write parts, too.

    Raises:
        OSError: this process or one of the others could not write.
    """
    with digests.threads(1 + len(others)) as threads:
        small = {name: threads.submit(write_file, folder / name, content) for name, content in contents.items()}
        early = {name: [p for p in image.parts if not at_end(image, p)] for name, image in images.items()}
        try:
            written = write_parts(threads, folder, images, early)
        finally:  # the others have ended their parts before this process removes or commits the folder
            reports = [other.receive() for other in others]
        for i, report in enumerate(reports, 1):
            if not isinstance(report, dict):
                raise OSError(report or f"process {i} of those that write it has ended")
            for name, (digests_of_parts, checksums) in report.items():
                written[name] |= {part: bytes.fromhex(digest) for part, digest in digests_of_parts}
                for place, checksum in checksums:
                    struct.pack_into("<I", images[name].memory, place, checksum)
        late = {name: [part for part in image.parts if at_end(image, part)] for name, image in images.items()}
        for name, parts in late.items():
            for part in parts:
                write_checksums(images[name], part)
        for name, more in write_parts(threads, folder, images, late).items():
            written[name] |= more
        list(threads.map(sync, [folder / name for name in images]))
        lines = {
            name: digests.line(image.size, [digest for _, digest in sorted(written[name].items())])
            for name, image in images.items()
        }
        return lines | {name: line.result() for name, line in small.items()}


def write_share(images: Mapping[str, Image], leader: Channel, processes: int) -> str:
    """Write this process's parts of a checkpoint when the leader has created its files, and report them to the leader.

    Returns:
        The problem, or "" for success.

    Raises:
        EOFError: the leader has ended.
    """
    if (folder := leader.receive()) is None:
        raise EOFError
    if not folder:
        return "the leader could not begin"
    try:
        with digests.threads(processes) as threads:
            parts = {name: image.parts for name, image in images.items()}
            written = write_parts(threads, Path(folder), images, parts)
            list(threads.map(sync, [Path(folder, name) for name, image in images.items() if image.parts]))
    except OSError as error:
        leader.send(str(error))
        return str(error)
    checksums = {name: [it for part in image.parts for it in image.checksums[part]] for name, image in images.items()}
    leader.send({name: ([(p, d.hex()) for p, d in written[name].items()], checksums[name]) for name in images})
    return ""


def read_into(file: Path, places: Iterable[tuple[int, memoryview]]) -> None:
    """Read bytes of a file into memory, several pieces at once.

    Args:
        file: the file.
        places: (first byte in the file, memory to fill) for each range.

    Raises:
        OSError: the file cannot be read, or ends too early.
    """

    def read(start: int, memory: memoryview) -> None:
        populate(memory)
        while memory:
            if not (size := os.preadv(stream.fileno(), [memory], start)):
                raise OSError(errno.EIO, "the file ends too early", str(file))
            start, memory = start + size, memory[size:]

    pieces = [
        (start + i, memory[i : i + digests.CHUNK])
        for start, memory in places
        for i in range(0, len(memory), digests.CHUNK)
    ]
    with file.open("rb", buffering=0) as stream, digests.threads() as threads:
        list(threads.map(read, *zip(*pieces, strict=True)))


def populate(memory: memoryview) -> None:
    """Ask the kernel for all pages of this memory at once; a page fault for each one takes longer than the reading.

    A kernel before Linux 5.14 refuses that, so that each page is allocated when it is written to.
    """
    madv_populate_write = 23
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0
    start, end = -(-first // PAGESIZE) * PAGESIZE, (first + len(memory)) // PAGESIZE * PAGESIZE
    if start < end:
        LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), madv_populate_write)


def at_end(image: Image, part: int) -> bool:
    """Whether a part has bytes that depend on all other parts."""
    return digests.overlaps(part, (image.directory, image.size))


def write_parts(
    threads: ThreadPoolExecutor, folder: Path, images: Mapping[str, Image], parts: dict[str, list[int]]
) -> dict[str, dict[int, bytes]]:
    """Write parts of files; return their digests, by file and part."""
    begun = {
        name: {part: threads.submit(write_part, folder / name, images[name], part) for part in of_file}
        for name, of_file in parts.items()
    }
    return {name: {part: digest.result() for part, digest in of_file.items()} for name, of_file in begun.items()}


def write_part(path: Path, image: Image, part: int) -> bytes:
    """Write a part of a file that exists, and return its digest; the part may not be on disk yet.

    It is written directly (O_DIRECT) where the file system can do that: a copy into the page cache takes more CPU time
    than all the rest, and nobody reads the pages.
    """
    write_checksums(image, part)
    whole = digests.parts_of(image.size)[part]
    content = memoryview(image.memory)[whole.start : whole.stop]
    direct = len(content) // ALIGNMENT * ALIGNMENT
    try:
        write_at(path, content[:direct], whole.start, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        direct = 0
    write_at(path, content[direct:], whole.start + direct)
    return digests.ALGORITHMS[digests.ALGORITHM](content).digest()


def write_at(path: Path, content: memoryview, offset: int, flags: int = 0) -> None:
    """Write bytes into a file that exists; what goes into the page cache begins its way to the disk."""
    if not content:
        return
    descriptor = os.open(path, os.O_WRONLY | flags)
    try:
        place, left = offset, content
        while left:
            written = os.pwrite(descriptor, left, place)
            left, place = left[written:], place + written
        if not flags:
            begin_write_back(descriptor, offset, len(content))
    finally:
        os.close(descriptor)


def write_checksums(image: Image, part: int) -> None:
    """Put the checksums in a part of a zip archive right, and those at its end that repeat them."""
    image.checksums[part] = []
    for start, end, (place, repeated) in image.records_by_part.get(part, []):
        checksum = digests.crc32(memoryview(image.memory)[start:end])
        struct.pack_into("<I", image.memory, place, checksum)
        struct.pack_into("<I", image.memory, repeated, checksum)
        image.checksums[part].append((repeated, checksum))


def write_file(path: Path, content: bytes) -> Line:
    """Write a small file, have it on disk, and return its line of the manifest."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    parts = digests.parts_of(len(content))
    return digests.line(
        len(content), [digests.ALGORITHMS[digests.ALGORITHM](content[p.start : p.stop]).digest() for p in parts]
    )


def begin_write_back(descriptor: int, start: int, size: int) -> None:
    """Ask the kernel to begin writing a part of a file to disk, so that `fsync` finds little left to wait for."""
    sync_file_range_write = 2
    length = ctypes.c_int64
    LIBC.sync_file_range(descriptor, length(start), length(size), sync_file_range_write)
