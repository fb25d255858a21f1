"""Reading CoNLL files: a line for each word, with its tag in the last column, and an empty line between sentences."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from shared.datasets.files import blocks_of_lines, line_number
from shared.errors import UserError
from shared.tagging.tags import TAGS, WORDS

KINDS = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
DOCUMENT = "-DOCSTART-"  # CoNLL-2003 begins each document with a line of this word, which is not part of the text
BLOCK_WORDS = 1 << 17  # of a table, or one sentence
TEXT = pa.large_string()


class Words(NamedTuple):
    """The words of some lines."""

    words: pa.Array  # strings
    tags: pa.Array | None  # strings; None for a file of words only
    ends: NDArray[np.int64]  # for each line between sentences: how many of the words are before it


def read_conll(path: Path, source: str, untagged: bool = False) -> Iterator[pa.Table]:
    """The sentences of a CoNLL file, in blocks: tables with the columns tokens and tags, both lists of strings.

    Columns are separated by tabs, or otherwise by spaces. The first is the word, and the last is its tag. With
    `untagged`, a file with a single column is one of words, and gives the column tokens only.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or has no words, or a line has another number of columns than
            the first one; the message begins with `source`.
    """
    width = count = complete = 0  # of the words in `read`, `complete` are in sentences that have ended
    read: list[Words] = []
    for at, piece in blocks_of_lines(path, source):
        width = width or next((len(_fields(line)) for line in piece.decode().split("\n") if not _ends(line)), 0)
        found = _by_columns(piece, width) or _by_lines(piece, width, untagged, path, at, source)
        complete = count + int(found.ends[-1]) if len(found.ends) else complete
        count += len(found.words)
        read.append(found)
        if count >= BLOCK_WORDS and complete:
            whole = _joined(read)
            yield _table(whole, complete)
            read, count, complete = [_after(whole, complete)], count - complete, 0
    if not width:
        raise UserError(f"{source} has no words")
    if count:
        yield _table(_joined(read), count)


def _ends(line: str) -> bool:
    """Whether a line is not a word, but ends a sentence."""
    return not line.strip() or line.startswith(DOCUMENT)


def _fields(line: str) -> list[str]:
    """The columns of a line."""
    bare = line.rstrip("\r")
    return bare.split("\t") if "\t" in bare else re.split(" +", bare.strip(" "))


def _by_columns(piece: bytes, width: int) -> Words | None:
    """The words of lines with `width` columns, read by Arrow; None where only `_by_lines` is known to read the same.

    Args:
        piece: whole lines.
        width: the number of columns; at least 2.
    """
    if b"\t" not in piece and b" " in piece:
        if any(each in b"\n" + piece + b"\n" for each in (b"  ", b"\n ", b" \n")):
            return None
        piece = piece.replace(b" ", b"\t")
    if width < 2 or b"\r" in piece or piece.startswith(codecs.BOM_UTF8):  # which Arrow would leave out
        return None
    filled, empty = b"\n" + piece, b"\n" + b"\t" * (width - 1) + b"\n"
    for _ in range(2):  # an odd line of several empty ones, then an even one
        filled = filled.replace(b"\n\n", empty)
    added = (len(filled) - len(piece) - 1) // (width - 1)
    names = [str(column) for column in range(width)]
    first, last = names[0], names[-1]
    try:
        table = csv.read_csv(
            pa.BufferReader(filled.removeprefix(b"\n")),
            csv.ReadOptions(use_threads=False, block_size=len(filled), column_names=names),
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types={first: TEXT, last: TEXT}, include_columns=[first, last]),
        ).combine_chunks()
    except pa.ArrowInvalid:
        return None
    words, tags = (table[name].combine_chunks() for name in (first, last))
    if any(tag != tag.strip() for tag in pc.unique(tags).to_pylist()):
        return None
    empty_tags = pc.equal(tags, "")
    if pc.sum(empty_tags).as_py() != added:  # another line lacks its tag
        return None
    between = pc.or_(empty_tags, pc.starts_with(words, DOCUMENT))
    places = np.flatnonzero(between)
    is_word = pc.invert(between)
    return Words(words.filter(is_word), tags.filter(is_word), places - np.arange(len(places)))


def _by_lines(piece: bytes, width: int, untagged: bool, path: Path, at: int, source: str) -> Words:
    """The words of whole lines, read line by line.

    Args:
        piece: whole lines.
        width: the number of columns.
        untagged: whether the words may have no tags.
        path: of the file.
        at: the byte at which the piece begins.
        source: the name of the file in messages.

    Raises:
        UserError: a line has another number of columns, or no tag.
    """
    words: list[str] = []
    tags: list[str] = []
    ends = []
    for number, line in enumerate(piece.decode().removesuffix("\n").split("\n")):
        if _ends(line):
            ends.append(len(words))
            continue
        fields = _fields(line)
        if len(fields) != width or width < 2 - untagged or not fields[-1].strip():
            bare, first = line.rstrip("\r"), line_number(path, source, at)
            raise UserError(
                f"{source} is malformed in line {first + number:,}: it has {_columns(len(fields))} ({bare!r:.60}), and "
                f"the first line has {width}: write each word and its tag in a line, with the same number of columns"
            )
        words.append(fields[0])
        if width > 1:
            tags.append(fields[-1].strip())
    return Words(pa.array(words, TEXT), pa.array(tags, TEXT) if width > 1 else None, np.array(ends, np.int64))


def _joined(read: list[Words]) -> Words:
    """All words in one; there are some."""
    some = [each for each in read if len(each.words)]
    starts = np.cumsum([0, *(len(each.words) for each in read)])
    ends = np.concatenate([start + each.ends for start, each in zip(starts, read, strict=False)])
    tags = [each.tags for each in some if each.tags is not None]
    return Words(pa.concat_arrays([each.words for each in some]), pa.concat_arrays(tags) if tags else None, ends)


def _after(read: Words, count: int) -> Words:
    """The words after the first `count`, at which a sentence ends."""
    tags = None if read.tags is None else read.tags.slice(count)
    return Words(read.words.slice(count), tags, np.zeros(0, np.int64))


def _table(read: Words, count: int) -> pa.Table:
    """The sentences of the first `count` words, at which a sentence ends, as lists of words and of tags, if any."""
    ends = pa.array(np.unique([0, *read.ends, count]), pa.int64())
    columns = {WORDS: read.words} | ({} if read.tags is None else {TAGS: read.tags})
    return pa.table(
        {name: pa.LargeListArray.from_arrays(ends, column.slice(0, count)) for name, column in columns.items()}
    )


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"
