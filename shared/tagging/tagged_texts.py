"""Tagged texts as tables: from files, data sets and the embedded sources, with words and tags or with spans.

In all tables of this module, the column "tokens" is a list of words, and "tags" a list with the tag of each word.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.compat.of_datasets import class_names
from shared.datasets import readers, rows
from shared.datasets.label_columns import names_of_ids
from shared.datasets.readers import blocks_of_lines, find_files, is_list, kind_of, lines_of_text
from shared.datasets.rows import ROW_COLUMN, column_of, is_text, refuse_missing, source_of, where
from shared.datasets.tables import read_parts, split
from shared.demo_data import tagged_functions
from shared.errors import UserError, about, count_of, listed, say
from shared.pretrained.from_pretrained import label_order
from shared.tagging.tags import OUTSIDE, TAGS, WORDS, Tags, sizes_of

FORMAT = 3  # part of the cache's names: increase it when the files for the same input change
TEXT_FLAG, TAG_FLAG = "--text_column_name", "--label_column_name"
CONLL = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
KINDS = (".json", ".jsonl", ".parquet", *CONLL)
DOCUMENT = "-DOCSTART-"  # CoNLL-2003 begins each document with a line of this word, which is not part of the text
LISTS = pa.large_list(pa.large_string())
WORD = re.compile(r"\w[\w\0]*|[^\w\s]")  # in a text with \0 for combining marks
SPAN = "{start, end, label}"


def load_tagged(config: Any) -> tuple[pa.Table, pa.Table, Tags]:
    """The training texts, the validation texts and the tags, in the order of the pretrained model's outputs.

    Raises:
        UserError: the data cannot be read, or a text and its tags do not fit each other.
    """
    columns = (config.text_column_name, config.label_column_name)
    embedded = "the embedded sources", tagged_functions.load
    raw = read_parts(config, columns[:1], columns[1:], embedded=embedded, read=read_files)
    names = class_names(raw[0], columns[1]) if columns[1] in raw[0].column_names else ()
    tables = [tagged(table, *columns) for table in raw]
    tags = Tags.of(tables[0], names)  # before the split, so that both parts have the same tags
    train, validation = split(tables, config)
    if config.model_name_or_path:
        tags = Tags(label_order(config.model_name_or_path, tags.names, config.revision))
    if tags.of_no_scheme:
        say(
            f"{source_of(train)} has tags of no scheme ({listed([*map(repr, tags.of_no_scheme)])}), so all tags are "
            "plain: each word whose tag is not O is an entity of its own"
        )
    return train, validation, tags


def read_files(given: Sequence[str], flag: str, csv_delimiter: str | None = None, untagged: bool = False) -> pa.Table:
    """The rows of the files that `given` names; each sentence of a CoNLL file is a row. `untagged`: see `read_conll`.

    They are memory-mapped: see `rows`.

    Raises:
        UserError: a file cannot be read, or two files have different columns.
    """

    def read(path: Path, source: str) -> Iterator[pa.Table]:
        if kind_of(path) in CONLL:
            return read_conll(path, source, untagged)
        return readers.blocks(path, source)

    how = f"tagged texts, format {FORMAT}, {untagged=}"
    return rows.load_files(find_files(given, flag, KINDS, csv_delimiter), flag, f"{flag} {' '.join(given)}", read, how)


def read_conll(path: Path, source: str, untagged: bool = False) -> Iterator[pa.Table]:
    """The sentences of a CoNLL file, in blocks: tables with the columns tokens and tags, both lists of strings.

    Columns are separated by tabs, or otherwise by spaces. The first is the word, and the last is its tag. With
    `untagged`, a file with a single column is one of words, and gives the column tokens only.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or has no words, or a line has another number of columns than
            the first one; the message begins with `source`.
    """
    width, first_line, begun = 0, 1, pa.array([], pa.large_string())  # the lines of a sentence that has not ended
    for _, piece in chain(blocks_of_lines(path, source), [(0, b"\n")]):  # an empty line ends the last sentence
        lines = pa.concat_arrays([begun, lines_of_text(piece)])
        between = np.asarray(pc.or_(pc.equal(pc.utf8_trim_whitespace(lines), ""), pc.starts_with(lines, DOCUMENT)))
        complete = 1 + int(np.flatnonzero(between).max(initial=-1))
        begun, is_word = lines.slice(complete), ~between[:complete]
        of_words = lines.slice(0, complete).filter(pa.array(is_word))
        spaced = pc.replace_substring_regex(pc.utf8_trim(of_words, " "), " +", "\t")
        fields = pc.split_pattern(pc.if_else(pc.match_substring(of_words, "\t"), of_words, spaced), "\t")
        if len(fields):
            width = width or len(fields[0])
            words = _words(fields, width, untagged, first_line + np.flatnonzero(is_word), source)
            bounds = pa.array(np.unique([0, *np.cumsum(is_word)[~is_word]]), pa.int64())
            lists = [pa.LargeListArray.from_arrays(bounds, column.combine_chunks()) for column in words.columns]
            yield pa.table(lists, words.column_names)
        first_line += complete
    if not width:
        raise UserError(f"{source} has no words")


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


def tagged(table: pa.Table, text_column: str, label_column: str) -> pa.Table:
    """The columns tokens and tags of a table, from lists of words and tags, or from texts and their spans.

    Rows without words are left out, and their number is printed. If the table is memory-mapped, so is the result.

    Raises:
        UserError: no row has words; see also `words_and_tags`.
    """

    def convert(block: pa.Table) -> pa.Table:
        words, tags, widened = words_and_tags(block, text_column, label_column)
        result = pa.table({WORDS: words, TAGS: tags, ROW_COLUMN: block[ROW_COLUMN], "widened": widened})
        return result.filter(pa.array(have_words(words)))

    names = class_names(table, label_column, "label") if label_column in table.column_names else ()
    result = rows.converted(table, convert, "tagged", FORMAT, text_column, label_column, names)
    if widened := pc.sum(result["widened"]).as_py():
        say(
            f"{source_of(table)}: {widened:,} spans in the column {label_column} begin or end inside a word and are "
            "widened to whole words"
        )
    if not result.num_rows:
        raise UserError(f"{source_of(table)} has no words in {text_column}: use the column of the words as {TEXT_FLAG}")
    if skipped := table.num_rows - result.num_rows:
        say(f"{source_of(table)}: {skipped:,} rows without words are skipped")
    return result.drop_columns(["widened"])


def have_words(words: pa.LargeListArray) -> NDArray[np.bool_]:
    """bool [rows]: whether a row of `words` has a word that is not blank."""
    given = pc.not_equal(pc.utf8_trim_whitespace(words.flatten()), "")
    return np.bincount(np.asarray(pc.list_parent_indices(words)), np.asarray(given), len(words)) > 0


def places_of_words(text: str) -> list[tuple[int, int]]:
    """Where the words of a text with spans begin and end: runs of letters and digits, and single other characters.

    The combining marks of a letter, such as the vowel signs of Hindi, belong to its word.
    """
    marked = text if text.isascii() else "".join("\0" if category(each)[0] == "M" else each for each in text)
    return [match.span() for match in WORD.finditer(marked)]


def words_of(table: pa.Table, text_column: str) -> pa.LargeListArray:
    """The words of each row of a table, from lists of words or from texts.

    Raises:
        UserError: the column does not exist or has another type, or a row or a word has no value.
    """
    texts = _cells(table, text_column, TEXT_FLAG)
    if is_text(texts.type):
        return pa.array([[text[slice(*place)] for place in places_of_words(text)] for text in texts.to_pylist()], LISTS)
    value = getattr(texts.type, "value_type", texts.type)
    if not (is_text(value) or pa.types.is_null(value)):
        raise UserError(
            f"{TEXT_FLAG} {text_column}: this column of {source_of(table)} contains {texts.type}, not lists of words, "
            "or texts"
        )
    return _strings(table, texts, text_column, TEXT_FLAG)


def words_and_tags(
    table: pa.Table, text_column: str, label_column: str
) -> tuple[pa.LargeListArray, pa.LargeListArray, NDArray[np.int32]]:
    """The words and the tags of each row of a table, from lists of words and tags, or from texts and their spans.

    The tags are strings or ClassLabel numbers, which become their names. The third value, int32 [rows], is the number
    of spans of each row that were widened to whole words: see `_of_spans`.

    Raises:
        UserError: a column does not exist or has another type, a row has no value or not one tag for each word, or a
            span does not fit its text.
    """
    texts, labels = _cells(table, text_column, TEXT_FLAG), _cells(table, label_column, TAG_FLAG)
    value = labels.type.value_type if is_list(labels.type) else labels.type
    has_spans = value != labels.type and pa.types.is_struct(value)
    if is_text(texts.type) != has_spans and not pa.types.is_null(value):
        raise UserError(
            f"{TAG_FLAG} {label_column}: this column of {source_of(table)} contains {labels.type}; texts need "
            f"lists of spans {SPAN}, and lists of words need lists of tags"
        )
    if is_text(texts.type):
        return _of_spans(table, texts, labels, label_column)
    words, tags = words_of(table, text_column), _strings(table, labels, label_column, TAG_FLAG)
    sizes = [sizes_of(lists) for lists in (words, tags)]
    if len(rows := np.flatnonzero(sizes[0] != sizes[1])):
        found = f"{sizes[0][rows[0]]:,} words in {text_column} and {sizes[1][rows[0]]:,} tags in {label_column}"
        raise UserError(f"{where(table, int(rows[0]))} has {found}: write one tag for each word")
    return words, tags, np.zeros(table.num_rows, np.int32)


def _cells(table: pa.Table, name: str, flag: str) -> pa.Array:
    """The values of a column; UserError if the column does not exist, or a row has no value."""
    cells = column_of(table, name, flag).combine_chunks()
    refuse_missing(table, name, cells.is_null(), what="value")
    return cells


def _strings(table: pa.Table, cells: pa.Array, name: str, flag: str) -> pa.LargeListArray:
    """Lists of words or tags as lists of strings; ClassLabel numbers become their names.

    Raises:
        UserError: they are no lists, or an entry has no value.
    """
    names = class_names(table, name)
    with about(f"{flag} {name}: {source_of(table)}"):
        lists = cells.cast(pa.large_list(pa.int64()) if names else LISTS)
    values, rows = lists.flatten(), np.asarray(pc.list_parent_indices(lists))
    gaps = values.is_null() if names or flag == TEXT_FLAG else pc.equal(pc.fill_null(values, ""), "")
    if len(missing := np.flatnonzero(gaps)):
        row = int(rows[missing[0]])
        raise UserError(f"{where(table, row)} has an entry without a value in {name}: fill it in, or remove the row")
    if not names:
        return lists
    found = names_of_ids(table, name, values.to_numpy(), rows, names, "the tag ").cast(pa.large_string())
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(sizes_of(lists))), found)


def _of_spans(
    table: pa.Table, texts: pa.Array, labels: pa.Array, label_column: str
) -> tuple[pa.LargeListArray, pa.LargeListArray, NDArray[np.int32]]:
    """The words of texts, with IOB2 tags from the spans of each text, and each text's number of widened spans.

    A span {start, end, label} covers the characters from `start` up to `end`, which is excluded. Its label is a text or
    a ClassLabel number. A span that begins or ends inside a word is widened to the whole word.

    Raises:
        UserError: a span is incomplete, lies outside its text, contains no word, or shares a word with another span.
    """
    words, all_tags, widened = [], [], np.zeros(len(texts), np.int32)
    names = dict(enumerate(class_names(table, label_column, "label")))
    for row, (text, spans) in enumerate(zip(texts.to_pylist(), labels.to_pylist(), strict=True)):
        places = places_of_words(text)
        begins, ends, tags = [begin for begin, _ in places], [end for _, end in places], [OUTSIDE] * len(places)
        for span in spans:
            start, end, label = map((span or {}).get, ("start", "end", "label"))
            label = names.get(label) if names else label
            inside = isinstance(start, int | float) and isinstance(end, int | float) and 0 <= start < end <= len(text)
            first, last = (bisect_right(ends, start), bisect_left(begins, end) - 1) if inside else (0, -1)
            if label in (None, "") or {*tags[first : last + 1]} != {OUTSIDE}:
                raise UserError(
                    f"{where(table, row)} has a span in {label_column} that lacks a label, lies outside its text of "
                    f"{len(text):,} characters, contains no word, or shares one with another span ({span!s:.80}): "
                    "correct it"
                )
            widened[row] += begins[first] < start or ends[last] > end
            tags[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
        words.append([text[begin:end] for begin, end in places])
        all_tags.append(tags)
    return pa.array(words, LISTS), pa.array(all_tags, LISTS), widened
