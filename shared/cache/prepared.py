"""The cache of prepared data: each folder is built by one process and is complete or absent.

Work that consists of many such folders is divided among processes: see `division.py`.
"""

import glob
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from shared.disk import is_url, remove_unfinished, sync, usual_permissions
from shared.errors import UserError

RECORD = "complete.json"  # the `fingerprints` of the folder when it was built
EDGE_BYTES = 1 << 16  # how much of each end of a file is compared at each start: cheap for files of any size
IN_MEMORY = 1 << 20  # maximum number of bytes of an array of `shared_array` that stays in memory

Job = TypeVar("Job")
Prepared = TypeVar("Prepared")
Arrays = Mapping[str, NDArray[Any]]


def cache_dir() -> Path:
    """The folder for prepared data: $ACCELERATE_RECIPES_CACHE, or accelerate-recipes in the user's cache folder."""
    if given := os.environ.get("ACCELERATE_RECIPES_CACHE"):
        if is_url(given):
            raise UserError(f"ACCELERATE_RECIPES_CACHE={given} is a URL: give a folder of this machine")
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate-recipes"


def build_once(name: str, build: Callable[[Path], object]) -> Path:
    """The folder `cache_dir()/name`; if it is missing, `build(folder)` fills it.

    The first process on a machine builds it in a temporary folder, which is renamed when complete. The other processes
    wait on a file lock, because a collective would time out. `name` contains a digest of everything that the content
    depends on, so a complete folder is valid. A damaged folder is built again, with a message.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if not is_complete(cache_dir() / name):
        with locked(cache_dir() / name):
            _build(cache_dir() / name, build)
    return cache_dir() / name


def build_if_free(name: str, build: Callable[[Path], object]) -> bool:
    """As `build_once`, without waiting: False if another process is building the folder, True once it is complete."""
    with suppress(Timeout), locked(cache_dir() / name, wait=False):
        _build(cache_dir() / name, build)
        return True
    return False


def _build(folder: Path, build: Callable[[Path], object]) -> None:
    """Build a folder, whose lock this process holds, unless it is complete."""
    if is_complete(folder):
        return
    of_this_machine = f"{folder.name}.partial-{socket.gethostname()}@"
    if folder.exists():
        print(f"{folder} is damaged or from an older version: building it again", file=sys.stderr)
        folder.rename(folder.with_name(f"{of_this_machine}{os.getpid()}"))  # mapped files stay readable
    remove_unfinished(folder.parent, f"{glob.escape(of_this_machine)}*")  # others may be building, with locks of theirs
    partial = Path(tempfile.mkdtemp(prefix=of_this_machine, dir=folder.parent))
    try:
        build(partial)
        (partial / RECORD).write_text(json.dumps(fingerprints(partial)))
        usual_permissions(partial)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except Exception:  # the machines' locks may be separate: another one was faster, and has removed `partial`
        if not is_complete(folder):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    remove_unfinished(folder.parent, f"{glob.escape(folder.name)}.partial-*")


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder of the cache, which all processes take that build it.

    Raises:
        Timeout: another process holds the lock, and `wait` is False.
        UserError: the lock cannot be taken, or the block raises an OSError, because the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")).acquire(blocking=wait):
            yield
    except Timeout:  # an OSError, too
        raise
    except OSError as error:
        raise UserError(
            f"cannot write prepared data to {cache_dir()} ({error.strerror or error}): set ACCELERATE_RECIPES_CACHE to "
            "another folder"
        ) from None


class Unfinished(Exception):
    """The share of this task is complete, and that of another task is not; the message tells how much is missing."""


_task: ContextVar[tuple[int, int]] = ContextVar("task", default=(0, 1))  # of a job array: its number, and their count


@contextmanager
def only_task(task: int, tasks: int) -> Iterator[None]:
    """In this block, do only the jobs of one task of divided work: `task`, `task + tasks`, ..., counted from 0."""
    before = _task.set((task, tasks))
    try:
        yield
    finally:
        _task.reset(before)


def share_of_task(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of this task (`only_task`), or all jobs."""
    task, tasks = _task.get()
    return [*jobs[task::tasks]]


def place_to_begin(count: int) -> int:
    """Where this process begins with `count` jobs that all processes and tasks share: each begins elsewhere."""
    task, tasks = _task.get()
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return count * (task * processes + rank) // (tasks * processes)


def each_share(prepare: Callable[[Job], Prepared], jobs: Iterable[Job]) -> list[Prepared]:
    """`prepare(job)` for each job, in order; a task of a job array does its share of all of them before it ends.

    Raises:
        Unfinished: `prepare` raised it for at least one job. The message is that of all of them.
    """
    done: list[Prepared] = []
    left: list[str] = []
    for job in jobs:
        try:
            done.append(prepare(job))
        except Unfinished as unfinished:
            left.append(str(unfinished))
    if left:
        raise Unfinished("; ".join(left))
    return done


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """[size, digest of both ends] of each file in a folder, by its relative path."""
    found: dict[str, list[Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.blake2b(file.read(EDGE_BYTES), digest_size=8)
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
        found[str(path.relative_to(folder))] = [size, digest.hexdigest()]
    return found


def is_complete(folder: Path) -> bool:
    """Whether a folder exists and the sizes and both ends of its files are as when it was built."""
    try:
        return bool(json.loads((folder / RECORD).read_text()) == fingerprints(folder))
    except (OSError, ValueError):
        return False


def write_arrays(folder: Path, blocks: Iterable[Arrays], places: Mapping[str, str] = {}) -> None:
    """Write arrays of unknown lengths, which come in blocks: NAME.npy gets the arrays of each name, concatenated.

    The files have the bytes that `np.save` writes for the same arrays.

    Args:
        folder: of the files.
        blocks: arrays by name; a block may lack some of the names.
        places: {array of places: the array in which they are places}. In a block, they count from the end of the
            blocks before it; in the file, from its beginning.
    """
    files: dict[str, BinaryIO] = {}
    empty: dict[str, NDArray[Any]] = {}  # the first array of each name without its rows, for the type
    begins: dict[str, int] = {}  # the bytes of the header of each file
    lengths: Counter[str] = Counter()

    def write_header(name: str) -> int:
        described = np.lib.format.header_data_from_array_1_0(empty[name])
        files[name].seek(0)
        shape = lengths[name], *empty[name].shape[1:]
        np.lib.format.write_array_header_1_0(files[name], described | {"shape": shape})
        return files[name].tell()

    with ExitStack() as stack:
        for arrays in blocks:
            for name, array in arrays.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.npy").open("wb"))
                    empty[name] = array[:0]
                    begins[name] = write_header(name)
                assert array.shape[1:] == empty[name].shape[1:], f"rows of shape {array.shape[1:]} in {name}"
                rows = array + lengths[places[name]] if name in places else array
                files[name].write(np.ascontiguousarray(rows, empty[name].dtype).data)
            lengths.update({name: len(array) for name, array in arrays.items()})
        for name in files:
            assert write_header(name) == begins[name], "the header of a longer array has another size"


def read_array(path: Path) -> np.ndarray:
    """A .npy file, memory-mapped, as a plain array: slicing an np.memmap takes several times as long."""
    return np.load(path, mmap_mode="r").view(np.ndarray)


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [sum of counts]: start, start + 1, ..., start + count - 1 of each range, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())


def mapped_file(array: np.ndarray) -> Path | None:
    """The file of an array from `read_array`; None for an array in memory."""
    return Path(array.base.filename) if isinstance(array.base, np.memmap) else None  # type: ignore[arg-type]


def shared_array(blocks: Callable[[], Iterable[np.ndarray]], dtype: Any) -> np.ndarray:
    """The concatenated blocks as one array [N]: memory-mapped, or in memory if it is small.

    The file has a digest of the content in its name, and the first process of a machine writes it.

    Args:
        blocks: returns the blocks [n]. It is called a second time if the file does not exist, so that no process holds
            all of them.
        dtype: of the array.
    """
    digest, small, size = hashlib.blake2b(np.dtype(dtype).str.encode(), digest_size=16), [], 0
    for block in blocks():
        array = np.ascontiguousarray(block, dtype)
        digest.update(array.data)
        size += array.nbytes
        if size <= IN_MEMORY:
            small.append(array)
    if size <= IN_MEMORY:
        return np.concatenate([np.empty(0, dtype), *small])

    def build(folder: Path) -> None:
        write_arrays(folder, ({"array": block} for block in chain([np.empty(0, dtype)], blocks())))

    return read_array(build_once(f"array-{digest.hexdigest()}", build) / "array.npy")


def key_digest(*key: object) -> str:
    """A digest of a key, for the name of a folder."""
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def text_once(name: str | None, file: str, compute: Callable[[], str]) -> str:
    """The result of `compute`, which is called once per machine, from this file in the folder `name`; None: no file."""
    if not name:
        return compute()
    folder = build_once(name, lambda folder: (folder / file).write_text(compute()))
    return (folder / file).read_text()
