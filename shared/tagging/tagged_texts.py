"""Tagged texts as tables: from files, data sets and the embedded sources, with words and tags or with spans.

In all tables of this module, the column "tokens" is a list of words, and "tags" a list with the tag of each word.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.datasets import arrow_files, readers
from shared.datasets.files import find_files, kind_of
from shared.datasets.label_cells import class_names
from shared.datasets.rows import (
    FILL_IN,
    ROW_COLUMN,
    column_of,
    is_text,
    named,
    numbered,
    source_of,
    where,
)
from shared.datasets.tables import hold_out, limited, read_dataset, skip_incomplete
from shared.demo_data import tagged_functions
from shared.errors import UserError, say
from shared.pretrained.from_pretrained import label_order
from shared.tagging import conll
from shared.tagging.tags import OUTSIDE, TAGS, WORDS, Tags

FORMAT = 1  # part of the cache's names: increase it when the files for the same input change
TEXT_FLAG, TAG_FLAG = "--text_column_name", "--label_column_name"
KINDS = (".json", ".jsonl", ".parquet", *conll.KINDS)
LISTS = pa.large_list(pa.large_string())
WORD = re.compile(r"\w+|[^\w\s]")  # the words of a text with spans: letters and digits, or one other character
BATCH_ROWS = 1000  # of texts with spans that are Python objects at once
SPAN = "{start, end, label}"


def load_tagged(config: Any) -> tuple[pa.Table, pa.Table, Tags]:
    """The training texts, the validation texts and the tags, in the order of the pretrained model's outputs.

    Raises:
        UserError: the data cannot be read, a text and its tags do not fit each other, or a tag of the validation texts
            does not occur in training.
    """
    columns = (config.text_column_name, config.label_column_name)
    raw = _read(config, columns)
    if config.skip_incomplete_rows:
        raw = [skip_incomplete(table, columns) for table in raw]
    names = class_names(raw[0], columns[1]) if columns[1] in raw[0].column_names else ()
    tables = [tagged(table, *columns) for table in raw]
    tags = Tags.of(tables[0], names)  # before the split, so that both parts have the same tags
    train, validation = tables if len(tables) == 2 else hold_out(tables[0], config)
    train, validation = limited((train, validation), config)
    if config.model_name_or_path:
        tags = tags.ordered(label_order(config.model_name_or_path, tags.names, config.revision))
    for table in (train, validation):
        tags.report_violations(table)
    return train, validation, tags


def _read(config: Any, columns: tuple[str, str]) -> list[pa.Table]:
    """The tables of --train_file, --dataset_name or the embedded data: training, and validation if there is any."""
    if config.csv_delimiter is not None:
        raise UserError(f"--csv_delimiter {config.csv_delimiter} has no effect on tagged texts: remove it")
    if config.train_file:
        given = {"--train_file": config.train_file, "--validation_file": config.validation_file}
        return [read_files(names, flag) for flag, names in given.items() if names]
    if config.dataset_name:
        return [table for table in read_dataset(config, columns[1:]) if table is not None]
    return [named(table, "the embedded sources") for table in tagged_functions.load()]


def read_files(given: Sequence[str], flag: str, untagged: bool = False) -> pa.Table:
    """The rows of the files that `given` names; each sentence of a CoNLL file is a row. `untagged`: see `read_conll`.

    They are in memory, or if they are large, memory-mapped: see `arrow_files`.

    Raises:
        UserError: a file cannot be read, or two files have different columns.
    """

    def read(path: Path, source: str) -> Iterator[pa.Table]:
        if kind_of(path) in conll.KINDS:
            return conll.read_conll(path, source, untagged)
        return readers.blocks(path, source)

    how = f"tagged texts, format {FORMAT}, {untagged=}"
    return arrow_files.load(find_files(given, flag, KINDS), flag, f"{flag} {' '.join(given)}", read, how)


def tagged(table: pa.Table, text_column: str, label_column: str) -> pa.Table:
    """The columns tokens and tags of a table, from lists of words and tags, or from texts and their spans.

    Rows without words are left out, and their number is printed. If the table is memory-mapped, so is the result.

    Raises:
        UserError: no row has words; see also `words_and_tags`.
    """

    def convert(block: pa.Table) -> tuple[pa.Table, int]:
        """The rows with words, and the number of widened spans."""
        try:
            words, tags, widened = _words_and_tags(block, text_column, label_column)
        except UserError:
            _checked_columns(table, text_column, label_column)  # raises the error that the whole table has
            raise
        result = pa.table({WORDS: words, TAGS: tags, ROW_COLUMN: numbered(block)[ROW_COLUMN]})
        return result.filter(pa.array(have_words(words))), widened

    names = class_names(table, label_column) if label_column in table.column_names else ()
    result, widened = arrow_files.converted(table, convert, "tagged", FORMAT, text_column, label_column, names)
    _report_widened(table, label_column, widened)
    if not result.num_rows:
        raise UserError(f"{source_of(table)} has no words in {text_column}: use the column of the words as {TEXT_FLAG}")
    if skipped := table.num_rows - result.num_rows:
        say(f"{source_of(table)}: {skipped:,} rows without words are skipped")
    return result


def have_words(words: pa.LargeListArray) -> NDArray[np.bool_]:
    """bool [rows]: whether a row of `words` has a word that is not blank."""
    blank = pc.fill_null(pc.utf8_is_space(words.flatten()), True)
    blank = pc.or_(blank, pc.equal(pc.binary_length(words.flatten()), 0))
    return np.bincount(np.asarray(pc.list_parent_indices(words)), ~np.asarray(blank), len(words)) > 0


def words_of(table: pa.Table, text_column: str, label_column: str = "") -> pa.LargeListArray:
    """The words of each row of a table, from lists of words or from texts. The column of the labels is not read.

    Raises:
        UserError: the column does not exist or has another type, or a row or a word has no value.
    """
    texts = _column(table, text_column, TEXT_FLAG, _is_text_or_words, label_column)
    _refuse_missing(table, text_column, texts)
    texts = texts.combine_chunks()
    if is_text(texts.type):
        return pa.array([WORD.findall(text) for text in texts.to_pylist()], LISTS)
    words = _strings(texts)
    _refuse_gaps(table, text_column, words, words.flatten().is_null())
    return words


def words_and_tags(table: pa.Table, text_column: str, label_column: str) -> tuple[pa.LargeListArray, pa.LargeListArray]:
    """The words and the tags of each row of a table, from lists of words and tags, or from texts and their spans.

    The tags are strings or ClassLabel numbers, which become their names.

    Raises:
        UserError: a column does not exist or has another type, a row has no value or not one tag for each word, or a
            span does not fit its text.
    """
    words, tags, widened = _words_and_tags(table, text_column, label_column)
    _report_widened(table, label_column, widened)
    return words, tags


def _words_and_tags(
    table: pa.Table, text_column: str, label_column: str
) -> tuple[pa.LargeListArray, pa.LargeListArray, int]:
    """See `words_and_tags`; also the number of widened spans, which is not printed."""
    texts, labels = (cells.combine_chunks() for cells in _checked_columns(table, text_column, label_column))
    if is_text(texts.type):
        return _of_spans(table, texts, labels, label_column)
    return *_of_words(table, texts, labels, text_column, label_column), 0


def _checked_columns(table: pa.Table, text_column: str, label_column: str) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The two columns; UserError if their types do not fit, a row has no value, or it has not one tag for each word."""
    if text_column == label_column:
        raise UserError(f"{TEXT_FLAG} {text_column} and {TAG_FLAG} {label_column}: use different columns")
    texts = _column(table, text_column, TEXT_FLAG, _is_text_or_words, label_column)
    labels = _column(table, label_column, TAG_FLAG, lambda type_: _is_list(type_, _is_tag_or_span), text_column)
    for name, cells in ((text_column, texts), (label_column, labels)):
        _refuse_missing(table, name, cells)
    value = labels.type.value_type
    if is_text(texts.type):
        keys = {field.name for field in value} if pa.types.is_struct(value) else set()
        if not ({"start", "end", "label"} <= keys or pa.types.is_null(value)):
            raise UserError(
                f"{TAG_FLAG} {label_column}: this column of {source_of(table)} contains {labels.type}; with the texts "
                f"in {TEXT_FLAG} {text_column}, it needs lists of spans {SPAN}"
            )
    elif not (is_text(value) or pa.types.is_integer(value) or pa.types.is_null(value)):
        raise UserError(
            f"{TAG_FLAG} {label_column}: this column of {source_of(table)} contains {labels.type}, not lists of tags; "
            f"lists of spans need a column of texts as {TEXT_FLAG}"
        )
    else:
        _refuse_other_sizes(table, texts, labels, text_column, label_column)
    return texts, labels


def _refuse_other_sizes(
    table: pa.Table, texts: pa.ChunkedArray, labels: pa.ChunkedArray, text_column: str, label_column: str
) -> None:
    """UserError if a row has not one tag for each word."""
    message, rows_before, count = "", 0, 0
    for batch in pa.table([texts, labels], ["texts", "labels"]).to_batches():
        sizes = [np.asarray(pc.list_value_length(cells)) for cells in batch.columns]
        rows = np.flatnonzero(sizes[0] != sizes[1])
        if len(rows) and not count:
            found = f"{sizes[0][rows[0]]:,} words in {text_column} and {sizes[1][rows[0]]:,} tags in {label_column}"
            message = f"{where(table, rows_before + int(rows[0]))} has {found}"
        rows_before, count = rows_before + batch.num_rows, count + len(rows)
    if count:
        such = f" ({count:,} such rows)" if count > 1 else ""
        raise UserError(f"{message}{such}: write one tag for each word")


def _refuse_missing(table: pa.Table, name: str, cells: pa.ChunkedArray) -> None:
    """UserError if a row has no value in the column `name`."""
    if cells.null_count and len(rows := np.flatnonzero(cells.is_null())):
        raise UserError(f"{where(table, int(rows[0]))} has no value in {name}: {FILL_IN}")


def _refuse_gaps(table: pa.Table, name: str, cells: pa.LargeListArray, gaps: pa.Array) -> None:
    """UserError if an entry of the lists in the column `name` is one of the `gaps`."""
    if len(missing := np.flatnonzero(gaps)):
        row = int(np.asarray(pc.list_parent_indices(cells))[missing[0]])
        raise UserError(f"{where(table, row)} has an entry without a value in {name}: fill it in, or remove the row")


def _strings(cells: pa.Array) -> pa.LargeListArray:
    """Lists of any values as lists of strings."""
    return cells.cast(pa.large_list(cells.type.value_type)).cast(LISTS)


def _column(table: pa.Table, name: str, flag: str, fits: Callable[[pa.DataType], bool], taken: str) -> pa.ChunkedArray:
    """The column `name`; UserError if it does not exist or has another type.

    The error about a missing column names the columns of a fitting type, except the one that is `taken`.
    """
    others = [field.name for field in table.schema if fits(field.type) and field.name != taken]
    if others and name.casefold() not in map(str.casefold, table.column_names):
        there = ", ".join(table.column_names)
        raise UserError(
            f"{flag} {name}: {source_of(table)} has no such column (columns: {there}): use {flag} {' or '.join(others)}"
        )
    column = column_of(table, name, flag)
    if not fits(column.type):
        needs = "lists of words, or texts" if flag == TEXT_FLAG else f"lists of tags, or lists of spans {SPAN}"
        raise UserError(f"{flag} {name}: this column of {source_of(table)} contains {column.type}, not {needs}")
    return column


def _is_list(type_: pa.DataType, fits: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type is a list whose values have a type that fits; the values of empty lists in JSON have type null."""
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    return is_list and (fits(type_.value_type) or pa.types.is_null(type_.value_type))


def _is_text_or_words(type_: pa.DataType) -> bool:
    return is_text(type_) or _is_list(type_, is_text)


def _is_tag_or_span(type_: pa.DataType) -> bool:
    return is_text(type_) or pa.types.is_integer(type_) or pa.types.is_struct(type_)


# Lists of words and tags


def _of_words(
    table: pa.Table, texts: pa.Array, labels: pa.Array, text_column: str, label_column: str
) -> tuple[pa.Array, pa.Array]:
    """The words and tags of two columns of lists."""
    names = class_names(table, label_column)
    if names:
        labels = _named(table, labels, names, label_column)
    words, tags = _strings(texts), _strings(labels)
    _refuse_gaps(table, text_column, words, words.flatten().is_null())
    empty = pc.equal(pc.fill_null(tags.flatten(), ""), "")
    _refuse_gaps(table, label_column, tags, empty)
    return words, tags


def _named(table: pa.Table, labels: pa.Array, names: tuple[str, ...], column: str) -> pa.Array:
    """Lists of ClassLabel numbers as lists of their names."""
    labels = labels.cast(pa.large_list(labels.type.value_type))
    numbers = np.asarray(pc.fill_null(labels.flatten().cast(pa.int64()), -1))
    if len(nameless := np.flatnonzero((numbers < 0) | (numbers >= len(names)))):
        row = int(np.asarray(pc.list_parent_indices(labels))[nameless[0]])
        raise UserError(
            f"{where(table, row)} has the tag {numbers[nameless[0]]} in {column}, but its ClassLabel has names for 0 "
            f"to {len(names) - 1} only: correct the row"
        )
    sizes = np.asarray(pc.list_value_length(labels))
    named_tags = pa.array(names, pa.large_string()).take(pa.array(numbers))
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(sizes)), named_tags)


# Texts and spans


def _of_spans(
    table: pa.Table, texts: pa.Array, labels: pa.Array, label_column: str
) -> tuple[pa.LargeListArray, pa.LargeListArray, int]:
    """The words of texts, with IOB2 tags from the spans of each text, and the number of widened spans.

    A span {start, end, label} covers the characters from `start` up to `end`, which is excluded. A span that begins or
    ends inside a word is widened to the whole word.

    Raises:
        UserError: a span lies outside its text, contains no word, or shares a word with another span.
    """
    words, tags, widened = [pa.array([], LISTS)], [pa.array([], LISTS)], 0
    for first in range(0, len(texts), BATCH_ROWS):
        batch = texts.slice(first, BATCH_ROWS).to_pylist(), labels.slice(first, BATCH_ROWS).to_pylist()
        *found, more = _words_of_spans(table, first, *batch, label_column)
        words.append(pa.array(found[0], LISTS))
        tags.append(pa.array(found[1], LISTS))
        widened += more
    return pa.concat_arrays(words), pa.concat_arrays(tags), widened


def _words_of_spans(
    table: pa.Table, first_row: int, texts: list[str], spans_of_texts: list[list[dict[str, Any]]], label_column: str
) -> tuple[list[list[str]], list[list[str]], int]:
    """See `_of_spans`; the texts are those of the rows from `first_row` on."""
    words, tags, widened = [], [], 0
    for row, (text, spans) in enumerate(zip(texts, spans_of_texts, strict=True), first_row):
        begins, ends = [m.start() for m in WORD.finditer(text)], [m.end() for m in WORD.finditer(text)]
        here = [OUTSIDE] * len(begins)
        for span in spans:
            problem = None
            start, end, label = (span[key] for key in ("start", "end", "label"))
            if None in (start, end, label) or not 0 <= start < end <= len(text):
                problem = f"lies outside its text of {len(text):,} characters or has a gap"
            else:
                first, last = bisect_right(ends, start), bisect_left(begins, end) - 1
                if first > last:
                    problem = "contains no word"
                elif here[first : last + 1] != [OUTSIDE] * (last + 1 - first):
                    problem = "shares a word with another span"
            if problem:
                raise UserError(
                    f"{where(table, row)} has a span in {label_column} that {problem} ({span!s:.80}): correct it"
                )
            widened += begins[first] < start or ends[last] > end
            here[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
        words.append([text[begin:end] for begin, end in zip(begins, ends, strict=True)])
        tags.append(here)
    return words, tags, widened


def _report_widened(table: pa.Table, label_column: str, widened: int) -> None:
    if widened:
        say(
            f"{source_of(table)}: {widened:,} spans in the column {label_column} begin or end inside a word and are "
            "widened to whole words"
        )
