"""Finding the files that a flag names (files, patterns, folders), and reading them, compressed or not."""

import bz2
import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from shared.errors import UserError

COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd")),
}


def kind_of(path: Path) -> str:
    """The extension without compression, in lower case: ".csv" for reviews.CSV and for reviews.csv.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def is_compressed(path: Path) -> bool:
    """Whether a file's extension is that of a compression format."""
    return path.suffix.lower() in COMPRESSIONS


def find_files(given: Sequence[str], flag: str, kinds: Sequence[str]) -> list[Path]:
    """The files that `given` (files, patterns such as data/*.csv, folders) names, sorted by name.

    The order of `given` is ignored, because a shell that expands a pattern chooses an order of its own. From a folder,
    the files of known `kinds` are used, except hidden files and subfolders.

    Raises:
        UserError: a folder or pattern has no files, a file is named twice, or its kind is unknown.
    """
    found: list[Path] = []
    for name in given:
        path = Path(name)
        if os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises where the folder cannot be read
            found += _in_folder(path, f"{flag} {name}", kinds)
        elif glob.has_magic(name) and not os.path.exists(path):  # noqa: PTH110
            matches = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207  Path.glob refuses absolute patterns
            if not (matches := [match for match in matches if match.is_file()]):
                raise UserError(f"{flag} {name}: no file matches this pattern")
            found += matches
        else:
            found.append(path)
    by_content: dict[Path, Path] = {}
    for path in found:
        refuse_unknown(path, f"{flag} {path}", kinds)
        content = path.resolve().with_suffix("") if is_compressed(path) else path.resolve()
        if (same := by_content.setdefault(content, path)) is not path:
            twice = f"{flag} {path} is given twice" if same == path else f"{flag} {path} and {same} are the same data"
            raise UserError(f"{twice}: name each file once")
    return sorted(found, key=str)


def refuse_unknown(path: Path, source: str, kinds: Sequence[str]) -> None:
    """Raise UserError if a file is not of one of these kinds."""
    if kind_of(path) not in kinds:
        known = f"{', '.join(kinds)}, optionally compressed ({', '.join(COMPRESSIONS)})"
        raise UserError(f"{source}: unknown kind of file: use {known}")


def _in_folder(folder: Path, source: str, kinds: Sequence[str]) -> list[Path]:
    """The data files in a folder, which must all be of the same kind."""
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        raise UserError(f"{source} is a folder that save_to_disk wrote: use it as --dataset_name")
    try:
        inside = [path for path in folder.iterdir() if path.is_file() and path.name[0] not in "._"]
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    files = [path for path in inside if kind_of(path) in kinds]
    if not files:
        raise UserError(f"{source} is a folder without data files ({', '.join(kinds)}): use another folder")
    if len(found := sorted({kind_of(path) for path in files})) > 1:
        raise UserError(
            f"{source} is a folder with files of several kinds ({', '.join(found)}): select one kind with a pattern, "
            f"such as '{folder / ('*' + found[0])}'"
        )
    return files


@contextmanager
def opened(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file to read its decompressed bytes.

    Raises:
        UserError: it cannot be read, or its compression does not match its name; the message begins with `source`.
    """
    try:
        with path.open("rb") as file:
            yield COMPRESSIONS[path.suffix.lower()](file) if is_compressed(path) else file
    except FileNotFoundError:
        raise UserError(f"{source}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{source} cannot be read: {error.strerror}") from None
        raise UserError(f"{source} is malformed ({error}): is the file complete?") from None
