"""Finding the files that a flag names (files, patterns, folders), and reading bytes and lines, compressed or not."""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from shared.errors import UserError, about

BLOCK_BYTES = 1 << 22  # that are read at once, and the maximum length of a row of a CSV file
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


def find_files(given: Sequence[str], flag: str, kinds: Sequence[str], csv_delimiter: str | None = None) -> list[Path]:
    """The files that `given` (files, patterns such as data/*.csv, folders) names, sorted by name.

    The order of `given` is ignored, because a shell that expands a pattern chooses an order of its own. From a folder,
    the files of known `kinds` are used, except hidden files and subfolders.

    Raises:
        UserError: a folder or pattern has no files, a file is named twice, its kind is unknown, or --csv_delimiter has
            no effect.
    """
    found: list[Path] = []
    for name in given:
        path, files = Path(name), [Path(name)]
        if os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises where the folder cannot be read
            files = _in_folder(path, f"{flag} {name}", kinds)
        elif glob.has_magic(name) and not os.path.exists(path):  # noqa: PTH110
            matches = glob.glob(name, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns
            files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise UserError(f"{flag} {name}: no file matches this pattern")
        found += files
    by_content: dict[Path, Path] = {}
    for path in found:
        if kind_of(path) not in kinds:
            known = f"{', '.join(kinds)}, optionally compressed ({', '.join(COMPRESSIONS)})"
            raise UserError(f"{flag} {path}: unknown kind of file: use {known}")
        content = path.resolve().with_suffix("") if is_compressed(path) else path.resolve()
        if (same := by_content.setdefault(content, path)) is not path:
            raise UserError(f"{flag} {path} and {same} are the same data: name each file once")
    found.sort(key=str)
    if csv_delimiter is not None and not any(kind_of(file) in (".csv", ".tsv") for file in found):
        raise UserError(f"--csv_delimiter {csv_delimiter} has no effect on {flag} {found[0]}: remove it")
    return found


def _in_folder(folder: Path, source: str, kinds: Sequence[str]) -> list[Path]:
    """The data files in a folder."""
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        raise UserError(f"{source} is a folder that save_to_disk wrote: use it as --dataset_name")
    with about(source):
        inside = [path for path in folder.iterdir() if path.is_file() and path.name[0] not in "._"]
    files = [path for path in inside if kind_of(path) in kinds]
    if not files:
        raise UserError(f"{source} is a folder without data files ({', '.join(kinds)}): use another folder")
    if len(found := sorted({kind_of(path) for path in files})) > 1:
        raise UserError(f"{source}: files of several kinds ({', '.join(found)}): select one, such as '*{found[0]}'")
    return files


@contextmanager
def opened(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file to read its decompressed bytes; the block should do nothing but read.

    Raises:
        UserError: the file or its content cannot be read; the message begins with `source`.
    """
    with about(source):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise UserError(f"{source}: no such file") from None
        with file:
            yield COMPRESSIONS[path.suffix.lower()](file) if is_compressed(path) else file


def blocks_of_lines(path: Path, source: str, within: range | None = None) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a text file, in blocks of about BLOCK_BYTES, each with the byte at which it begins.

    Args:
        path: of the file.
        source: its name in messages.
        within: only the lines that begin at these bytes.

    Raises:
        UserError: a line is not UTF-8; names the line.
    """
    with opened(path, source) as file:
        at, stop = 0, float("inf")
        if within is not None:
            at, stop = within.start, within.stop
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # skips the line of the byte before `within`
        while at < stop and (block := file.read(int(min(BLOCK_BYTES, stop - at)))):
            if not block.endswith(b"\n"):
                block += file.readline()
            try:
                block.decode()
            except UnicodeDecodeError as error:
                line = line_number(path, source, at + error.start)
                raise UserError(
                    f"{source} is not UTF-8 (line {line:,}): convert it, for instance with iconv -f LATIN1 -t UTF-8"
                ) from None
            yield at, block if at else block.removeprefix(codecs.BOM_UTF8)
            at += len(block)


def line_number(path: Path, source: str, at: int) -> int:
    """The number, from 1, of the line with the byte `at` of a file's decompressed content."""
    with opened(path, source) as file:
        blocks = (file.read(min(BLOCK_BYTES, at - start)) for start in range(0, at, BLOCK_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)
