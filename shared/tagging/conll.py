"""Reading CoNLL files: a line for each word, with its tag in the last column, and an empty line between sentences."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from shared.datasets.files import CheckedText, opened
from shared.datasets.readers import whole_lines
from shared.errors import UserError
from shared.tagging.tags import TAGS, WORDS

KINDS = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
DOCUMENT = "-DOCSTART-"  # CoNLL-2003 begins each document with a line of this word, which is not part of the text
READ_BYTES = 1 << 20  # of a file, at once
BLOCK_WORDS = 1 << 17  # of a table, or one sentence


def read_conll(path: Path, source: str, untagged: bool = False) -> Iterator[pa.Table]:
    """The sentences of a CoNLL file, in blocks: tables with the columns tokens and tags, both lists of strings.

    Columns are separated by tabs, or otherwise by spaces. The first is the word, and the last is its tag. With
    `untagged`, a file with a single column is one of words, and gives the column tokens only.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or has no words, or a line has another number of columns than
            the first one; the message begins with `source`.
    """
    words: list[str] = []
    tags: list[str] = []
    ends, width = [0], 0
    for number, line in enumerate(_lines(path, source), 1):
        if not line.strip() or line.startswith(DOCUMENT):
            if len(words) > ends[-1]:
                ends.append(len(words))
            if len(words) >= BLOCK_WORDS:
                yield _table(words, tags, ends)
                words, tags, ends = [], [], [0]
            continue
        bare = line.rstrip("\r")
        fields = bare.split("\t") if "\t" in bare else re.split(" +", bare.strip(" "))
        width = width or len(fields)
        if len(fields) != width or width < 2 - untagged or not fields[-1].strip():
            raise UserError(
                f"{source} is malformed in line {number:,}: it has {_columns(len(fields))} ({bare!r:.60}), and the "
                f"first line has {width}: write each word and its tag in a line, with the same number of columns"
            )
        words.append(fields[0])
        if width > 1:
            tags.append(fields[-1].strip())
    if not width:
        raise UserError(f"{source} has no words")
    if len(words) > ends[-1]:
        ends.append(len(words))
    if words:
        yield _table(words, tags, ends)


def _lines(path: Path, source: str) -> Iterator[str]:
    """The lines of a file, without line breaks; UserError if it cannot be read or is not UTF-8."""
    with opened(path, source) as file:
        text = CheckedText(file, source)
        pieces = iter(lambda: text.read(READ_BYTES), b"")
        for place, lines in enumerate(whole_lines(pieces, source)):
            begun = lines if place else lines.removeprefix(codecs.BOM_UTF8)
            yield from begun.decode().removesuffix("\n").split("\n")


def _table(words: list[str], tags: list[str], ends: list[int]) -> pa.Table:
    """Sentences as lists of words and, unless `tags` is empty, of tags; `ends` is 0 and the end of each sentence."""
    columns = {WORDS: words} | ({TAGS: tags} if tags else {})
    texts = {name: pa.array(column, pa.large_string()) for name, column in columns.items()}
    return pa.table({name: pa.LargeListArray.from_arrays(ends, column) for name, column in texts.items()})


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"
