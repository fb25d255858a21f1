"""Finding the files that a flag names (files, patterns, folders), and reading bytes and lines, compressed or not."""

import bz2
import codecs
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

BLOCK_BYTES = 1 << 24  # that are read at once to check a text or to count its lines
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


class CheckedText(io.RawIOBase):
    """The bytes of a file, checked to be UTF-8 text: Arrow would read other text as a column of bytes.

    Attributes:
        lines, quotes: the numbers of line breaks and of quotation marks that have been read.

    Raises:
        UserError: while it is read, for text that is not UTF-8; the message begins with `source`.
    """

    def __init__(self, file: Any, source: str) -> None:
        self.file, self.source = file, source
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.at = self.lines = self.quotes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes of the file; return how many there were."""
        data = self.file.read(len(buffer))
        self._check(data)
        buffer[: len(data)] = data
        return len(data)

    def _check(self, data: bytes) -> None:
        if self.at == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{self.source} is UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
        if (zero := data.find(b"\0")) >= 0:
            found = f"byte {self.at + zero:,} is zero"
            raise UserError(f"{self.source} is not text ({found}): use a text file, or correct its extension")
        pending = len(self.decoder.getstate()[0])  # bytes of a character that the end of the last block cut off
        try:
            self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = error.start - pending  # in `data`
            line = self.lines + data.count(b"\n", 0, max(at, 0)) + 1
            raise UserError(
                f"{self.source} is not UTF-8 (byte {self.at + at:,}, line {line:,}): convert it, for instance with "
                "iconv -f LATIN1 -t UTF-8"
            ) from None
        self.at += len(data)
        self.lines += data.count(b"\n")
        self.quotes += data.count(b'"')


def refuse_non_utf8(data: bytes, source: str) -> None:
    """Raise UserError if `data` is not UTF-8 text."""
    text = CheckedText(io.BytesIO(data), source)
    while text.read(BLOCK_BYTES):
        pass


def lines(path: Path, source: str, within: range | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a file, or those that begin at the bytes `within`, each with the byte at which it begins.

    Raises:
        UserError: a line is not UTF-8; names the line.
    """
    with opened(path, source) as file:
        at = 0
        if within and within.start:
            file.seek(within.start - 1)
            at = within.start - 1 + len(file.readline())  # skips the line of the byte before `within`
        for line in file:
            if within is not None and at >= within.stop:
                return
            try:
                yield at, (line.removeprefix(codecs.BOM_UTF8) if at == 0 else line).decode()
            except UnicodeDecodeError:
                raise UserError(
                    f"{source} is not UTF-8 (line {line_number(path, source, at):,}): convert it, for instance with "
                    "iconv -f LATIN1 -t UTF-8"
                ) from None
            at += len(line)


def line_number(path: Path, source: str, at: int) -> int:
    """The number, from 1, of the line that begins at byte `at` of a file's decompressed content."""
    with opened(path, source) as file:
        blocks = (file.read(min(BLOCK_BYTES, at - start)) for start in range(0, at, BLOCK_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)
