"""Reading CoNLL files: a line for each word, with its tag in the last column, and an empty line between sentences."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.datasets.readers import blocks_of_lines, lines_of
from shared.errors import UserError, count_of
from shared.tagging.tags import TAGS, WORDS

KINDS = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
DOCUMENT = "-DOCSTART-"  # CoNLL-2003 begins each document with a line of this word, which is not part of the text


def read_conll(path: Path, source: str, untagged: bool = False) -> Iterator[pa.Table]:
    """The sentences of a CoNLL file, in blocks: tables with the columns tokens and tags, both lists of strings.

    Columns are separated by tabs, or otherwise by spaces. The first is the word, and the last is its tag. With
    `untagged`, a file with a single column is one of words, and gives the column tokens only.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or has no words, or a line has another number of columns than
            the first one; the message begins with `source`.
    """
    width = lines_before = 0
    begun: list[pa.Table] = []  # words of a sentence that has not ended
    for _, piece in blocks_of_lines(path, source):
        lines = lines_of(piece)
        between = pc.or_(pc.equal(pc.utf8_trim_whitespace(lines), ""), pc.starts_with(lines, DOCUMENT))
        numbers = lines_before + 1 + np.flatnonzero(pc.invert(between))
        lines_before += len(lines)
        fields = _fields(lines.filter(pc.invert(between)))
        if not width and len(fields):
            width = len(fields[0])
        if width:
            words = _words(fields, width, untagged, numbers, source)
            separators = np.flatnonzero(between)
            ends = separators - np.arange(len(separators))  # for each: how many of the words are before it
            complete = int(ends[-1]) if len(ends) else 0
            if len(ends):
                yield from _sentences([*begun, words.slice(0, complete)], ends)
                begun = []
            begun.append(words.slice(complete))
    if not begun:
        raise UserError(f"{source} has no words")
    yield from _sentences(begun, np.zeros(0, np.int64))


def _fields(lines: pa.Array) -> pa.ListArray:
    """The columns of each line."""
    tabbed = pc.match_substring(lines, "\t")
    spaced = pc.replace_substring_regex(pc.utf8_trim(lines, " "), " +", "\t")
    return pc.split_pattern(pc.if_else(tabbed, lines, spaced), "\t")


def _words(fields: pa.ListArray, width: int, untagged: bool, numbers: np.ndarray, source: str) -> pa.Table:
    """The first and the last column of lines with these numbers; UserError for a line without `width` columns."""
    widths = np.asarray(pc.list_value_length(fields))
    wrong = np.flatnonzero((widths != width) | (width < 2 - untagged))
    right = fields.slice(0, int(wrong[0]) if len(wrong) else len(fields))
    tags = pc.utf8_trim_whitespace(pc.list_element(right, width - 1))
    without_tag = np.flatnonzero(np.asarray(pc.equal(tags, "")))
    if len(without_tag) or len(wrong):
        line = int([*without_tag, *wrong][0])
        raise UserError(
            f"{source} is malformed in line {numbers[line]:,}: it has {count_of(int(widths[line]), 'column')} "
            f"({' '.join(fields[line].as_py())!r:.60}), and the first line has {width}: write each word and its tag in "
            "a line, with the same number of columns"
        )
    return pa.table({WORDS: pc.list_element(fields, 0)} | ({TAGS: tags} if width > 1 else {}))


def _sentences(begun: list[pa.Table], ends: np.ndarray) -> Iterator[pa.Table]:
    """A table of the sentences of these words, if there are any; `ends` count the words of the last part."""
    words = pa.concat_tables(begun)
    before = sum(map(len, begun[:-1]))
    bounds = pa.array(np.unique([0, *(before + ends), len(words)]), pa.int64())
    if len(words):
        lists = [pa.LargeListArray.from_arrays(bounds, column.combine_chunks()) for column in words.columns]
        yield pa.table(lists, words.column_names)
