"""Samples of several texts each: an anchor, its positive and, optionally, hard negatives."""

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shared.cache.prepared import Arrays, build_once, each_share, read_array, write_arrays
from shared.contrastive.models import static_tokenizer
from shared.datasets.label_columns import FLAG as LABEL_FLAG
from shared.datasets.label_columns import numbers_in
from shared.datasets.readers import is_list
from shared.datasets.rows import ROW_COLUMN, column_of, converted, refuse_missing, source_of, where
from shared.datasets.tables import read_file, read_parts, skip_incomplete, split
from shared.demo_data import pairs
from shared.encoders.packing import Packing, pack_or_pad, unpack_before_head
from shared.errors import UserError
from shared.plan.draws import hash64
from shared.text.tokenized import Item, Padding, Rows, TokenizedText, tokenize

FLAG = "--text_column_names"
FORMAT = 2  # part of the cache's names: increase it when the files for the same input change
ROWS_AT_ONCE = 10_000  # texts whose lengths are read, or digests computed, at once


def load_tuples(config: Any) -> tuple[pa.Table, pa.Table]:
    """The training and validation rows; by default, the docstrings and sources of functions of Python libraries.

    Raises:
        UserError: the data cannot be read, --text_column_names are not at least two different ones, the scores of
            --label_column_name are of other samples than pairs or all the same, or see `numbers_in`.
    """
    columns, score = config.text_column_names, config.label_column_name
    if len(columns) < 2 or len({*columns}) < len(columns):
        raise UserError(
            f"{FLAG} {' '.join(columns)}: name two or more columns, each once: of the anchors, of the positives and, "
            "optionally, of hard negatives"
        )
    if score and len(columns) > 2:
        raise UserError(f"{FLAG} {' '.join(columns)}: {LABEL_FLAG} {score} has scores of pairs: name two text columns")

    scored, kind = ((score,), "regression") if score else ((), None)
    embedded, negatives = ("the embedded functions", pairs.load), columns[2:]
    tables = split(read_parts(config, columns[:2], scored, kind, embedded, only_in_training=negatives), config)
    for table in tables if score else ():
        if np.ptp(numbers_in(table, score)) == 0:
            raise UserError(f"{LABEL_FLAG} {score}: all rows of {source_of(table)} have the same score: add others")
    return tables


def of_columns(config: Any, columns: Sequence[str]) -> Any:
    """The settings for some of --text_column_names, with a prompt and a maximum length for each of them.

    Raises:
        UserError: the number of prompts or of lengths is not that of --text_column_names.
    """
    known = config.text_column_names
    prompts = ("",) * len(known) if config.prompts is None else config.prompts
    lengths = config.max_length * len(known) if len(config.max_length) == 1 else config.max_length
    for flag, values in (("--prompts", prompts), ("--max_length", lengths)):
        if len(values) != len(known):
            given = f"{flag} {shlex.join(map(str, values))}"
            raise UserError(f"{given}: give one for each of {FLAG} {' '.join(known)}, {len(known)} in all")
    places = [known.index(name) for name in columns]
    chosen = {"prompts": tuple(prompts[i] for i in places), "max_length": tuple(lengths[i] for i in places)}
    return replace(config, text_column_names=tuple(columns), **chosen)


def corpus_of(config: Any) -> list[tuple[Any, pa.Table]]:
    """The settings and the rows of --corpus_file, whose texts are in the column of the positives; [] without one.

    Raises:
        UserError: the file cannot be read.
    """
    if not config.corpus_file:
        return []
    column = config.text_column_names[1]
    table = read_file(config.corpus_file, "--corpus_file", config.csv_delimiter)
    table = skip_incomplete(table, (column,)) if config.skip_incomplete_rows else table
    return [(of_columns(config, (column,)), table)]


def with_one_length(config: Any) -> Any:
    """The settings for code that knows one --max_length: that of the longest texts."""
    return SimpleNamespace(**(vars(config) | {"max_length": max(config.max_length)}))


def tokenize_tuples(table: pa.Table, config: Any, tokenizer: Any) -> "TextTuples":
    """The tokens of the texts in --text_column_names, after their prompts, each truncated by the tokenizer.

    With --label_column_name, the scores of the samples, too.

    Raises:
        UserError: a row has another number of negatives than the first, a prompt leaves no room for text, or see
            `of_columns`, `numbers_in` and `static_tokenizer`.
        UserError, Unfinished: see `tokenize`. A task of a job array writes its share of each column first.
    """
    config = of_columns(config, config.text_column_names)
    tokenizer = static_tokenizer(tokenizer) if config.static else tokenizer
    texts = []
    for place, column in enumerate(config.text_column_names):
        prompt, most = config.prompts[place], config.max_length[place]
        if prompt and tokenizer.num_special_tokens_to_add() + len(tokenizer.tokenize(prompt.rstrip())) >= most:
            raise UserError(f"--max_length {most} leaves no room for text after the prompt {prompt!r}: increase it")
        prepared, names = texts_in(table, column) if place > 1 else (table, [column])
        texts += [(prepared, (name,), tokenizer, most, prompt) for name in names]
    tokens = each_share(lambda text: tokenize(*text), texts)
    scores = numbers_in(table, config.label_column_name) if config.label_column_name else None
    return TextTuples(tokens, [name for _, (name,), *_ in texts], scores)


def texts_in(table: pa.Table, column: str) -> tuple[pa.Table, list[str]]:
    """A table in which a column of lists is one column for each place, and their names: "negatives 1", ...

    A column of texts is left in its table.

    Raises:
        UserError: there is no such column, or a row has no texts or another number of texts than the first.
    """
    cells = column_of(table, column, FLAG)
    if not is_list(cells.type):
        return table, [column]
    refuse_missing(table, column, cells.is_null(), what="text")
    counts = np.asarray(pc.list_value_length(cells))
    size = int(counts[0])
    if len(others := np.flatnonzero((counts != size) | (counts == 0))):
        raise UserError(
            f"{where(table, int(others[0]))} has {counts[others[0]]} texts in {column}, and the first row has "
            f"{size}: give all rows the same number, at least one"
        )
    names = [f"{column} {number}" for number in range(1, size + 1)]

    def convert(block: pa.Table) -> pa.Table:
        cells = column_of(block, column, FLAG)
        texts = [pc.list_element(cells, place) for place in range(size)]
        return pa.table([*texts, block[ROW_COLUMN]], [*names, ROW_COLUMN])

    return converted(table, convert, "texts", column, size), names


class TextTuples(Dataset):
    """The texts of several columns; sample i has text i of each column.

    Attributes:
        text_lengths: int32 [N, texts], the tokens of each text. A memory map, like the next two.
        lengths: int32 [N], the tokens of all texts of each sample together.
        longest: int32 [N], the tokens of the longest text of each sample.
        scores: float64 [N], the score of each sample, which may be memory-mapped; None if they have none.
        corpus: further texts that a search in the positives also has to search; () or one column of any length.
    """

    draws_random = False

    def __init__(
        self,
        columns: Sequence[TokenizedText],
        names: Sequence[str],
        scores: NDArray[np.float64] | None = None,
        corpus: Sequence[TokenizedText] = (),
    ) -> None:
        self.columns, self.names, self.corpus = tuple(columns), tuple(names), tuple(corpus)
        self.scores = scores
        name = hashlib.blake2b(" ".join(texts.folder.name for texts in columns).encode(), digest_size=16).hexdigest()

        def blocks() -> Iterator[Arrays]:
            for start in range(0, len(self.columns[0]), ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                each = np.stack([texts.lengths[rows] for texts in self.columns], axis=1).astype(np.int32)
                yield {"each": each.ravel(), "lengths": each.sum(1, dtype=np.int32), "longest": each.max(1)}

        folder = build_once(f"tuples-{FORMAT}-{name}", lambda folder: write_arrays(folder, blocks()))
        each, self.lengths, self.longest = (read_array(folder / f"{n}.npy") for n in ("each", "lengths", "longest"))
        self.text_lengths = each.reshape(-1, len(self.columns))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[Item, ...]:
        return tuple(texts[row] for texts in self.columns)

    def read_micro_batch(self, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> Rows:
        """The texts of `samples` as one array of each kind, all anchors, then all positives, and so on.

        The targets are the scores, float64 [1, samples], or else the texts' digests, int64 [texts, samples], for the
        loss of samples without scores; see `text_digests`.
        """
        columns: list[Any] = [texts.read_micro_batch(samples, epochs) for texts in self.columns]
        lengths, tokens = (np.concatenate(each) for each in zip(*(rows[:2] for rows in columns), strict=True))
        types = None if columns[0].types is None else np.concatenate([rows.types for rows in columns])
        if self.scores is not None:
            return Rows(lengths, tokens, types, self.scores[None, samples])
        return Rows(lengths, tokens, types, text_digests(tokens, lengths).reshape(-1, len(samples)))

    def sizes(self, collate: Padding | Packing) -> dict[str, Any]:
        """The arguments of `Plan` for the cost of a sample: its tokens, or all its texts padded to the longest one."""
        if collate.packed:
            return {"lengths": self.lengths, "packed": True}
        return {"lengths": self.longest, "padded": lambda n: len(self.columns) * collate.padded_lengths(n)}

    @property
    def texts(self) -> tuple[TokenizedText, ...]:
        """The texts of each column, and those of the corpus."""
        return self.columns + self.corpus

    def with_corpus(self, *corpus: "TextTuples") -> "TextTuples":
        """The same samples with the texts of `corpus`, of one column, besides the positives."""
        return TextTuples(self.columns, self.names, self.scores, [texts for each in corpus for texts in each.columns])

    def digests_of(self, place: int) -> NDArray[np.int64]:
        """The digests of the texts at a place in `texts`, int64 [their number]; see `text_digests`."""
        texts, found = self.texts[place], []
        for start in range(0, len(texts), ROWS_AT_ONCE):
            rows = np.arange(start, min(start + ROWS_AT_ONCE, len(texts)))
            lengths, tokens, *_ = texts.read_micro_batch(rows, rows)
            found.append(text_digests(tokens, lengths))
        return np.concatenate(found)

    def digest(self) -> str:
        content = hashlib.blake2b("".join(texts.digest() for texts in self.texts).encode(), digest_size=16)
        content.update(b"" if self.scores is None else np.ascontiguousarray(self.scores).data)
        return content.hexdigest()


def text_digests(tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 64-bit digest of the tokens of each text, int64 [texts]; `tokens` [T] are those of all texts.

    Texts are compared by the tokens that the model gets: texts that differ only after --max_length are the same.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(tokens)) - starts.repeat(lengths)
    mixed = hash64(places.astype(np.uint64), tokens.astype(np.uint64))
    return hash64(np.add.reduceat(mixed, starts)).view(np.int64)


def pack_or_pad_tuples(
    model: Any, train: TextTuples, tokenizer: Any, accelerator: Any, config: Any
) -> tuple[Padding | Packing, str]:
    """The collate function of samples, and a description for the user: see `pack_or_pad`.

    Raises:
        UserError: see `pack_or_pad`.
    """
    texts, config = train.columns[0], with_one_length(config)
    return pack_or_pad(model, texts, tokenizer, accelerator, config, unpack_before_head)
