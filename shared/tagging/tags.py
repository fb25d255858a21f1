"""Tags of words: their scheme, their numbers, and the entities that they mark."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.cache.prepared import key_digest, read_array, text_once
from shared.datasets.rows import content_of, source_of, where
from shared.errors import UserError, listed, say
from shared.tagging.text_blocks import batches_of, begins_of, make_arrays, sizes_of

FORMAT = 1  # part of the cache's names: increase it when the files for the same input change
WORDS, TAGS = "tokens", "tags"  # the columns of the tables of tagged texts: see tagged_texts.py
OUTSIDE = "O"
TAG = re.compile(r"([BIESLU])(?:-(.+))?")  # a prefix, and a kind of entity, which is missing if there is only one kind
O, B, I, E, S = range(5)  # noqa: E741  # the usual letters of the schemes
PREFIXES = {"B": B, "I": I, "E": E, "S": S, "L": E, "U": S}  # L and U are the BILOU names of E and S

Ints = NDArray[np.int64]


class Entities(NamedTuple):
    """Entities in the order of their words: int64 arrays [entities]."""

    first: Ints  # the first word of each
    last: Ints  # its last word
    kind: Ints  # the number of its kind


@dataclass(frozen=True)
class Tags:
    """The tags in the order of the model's outputs; a tag is a number from 0, and -1 is a word outside any entity.

    IOB1, IOB2, BIOES and BILOU tags have the forms B-PER, I-PER and O, or B, I and O. With any other tag, all tags are
    plain: each word whose tag is not O is an entity.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        kinds = listed([kind for kind in self.kinds_of_entities if kind])
        return f"{len(self.names)}{' plain' * self.plain} tags of words" + (f": {kinds}" if kinds else "")

    @classmethod
    def of(cls, table: pa.Table, class_names: Sequence[str] = ()) -> "Tags":
        """The tags of a training table: `class_names`, or the sorted tags that occur.

        Raises:
            UserError: there is only one tag.
        """
        found = _distinct_tags(table)
        if len(found) < 2:
            raise UserError(
                f"{source_of(table)}: every word has the tag {found[0]}, so there is nothing to learn: use the column "
                "of the tags as --label_column_name, or add texts with other tags"
            )
        return cls(tuple(class_names) or tuple(sorted(found)))

    def ordered(self, names: Sequence[str]) -> "Tags":
        """The same tags in the order of `names`, a permutation of the names of these tags."""
        assert sorted(names) == sorted(self.names), f"{names} are not {self.names}"
        return Tags(tuple(names))

    @cached_property
    def plain(self) -> bool:
        """Whether the tags follow no scheme."""
        return not all(name == OUTSIDE or TAG.fullmatch(name) for name in self.names)

    @cached_property
    def kinds_of_entities(self) -> list[str]:
        """The sorted names of the kinds; for tags without kinds (B, I, O), one empty name."""
        return sorted({self._parts(name)[1] for name in self.names if name != OUTSIDE})

    @cached_property
    def _prefixes(self) -> NDArray[np.int8]:  # [tags + 1]; the last entry is that of -1
        return np.array([*(self._parts(name)[0] for name in self.names), O], np.int8)

    @cached_property
    def _kinds(self) -> Ints:  # [tags + 1]
        numbers = {name: number for number, name in enumerate(self.kinds_of_entities)}
        return np.array([*(numbers.get(self._parts(name)[1], -1) for name in self.names), -1])

    def _parts(self, name: str) -> tuple[int, str]:
        """The prefix and the kind of a tag; a plain tag marks an entity of one word."""
        if name == OUTSIDE:
            return O, "\0"  # the name of no kind
        if self.plain:
            return S, name
        prefix, kind = TAG.fullmatch(name).groups("")  # type: ignore[union-attr]  # all names match
        return PREFIXES[prefix], kind

    @property
    def outside(self) -> int:
        """The number of the tag O; -1 if no tag is O."""
        return self.names.index(OUTSIDE) if OUTSIDE in self.names else -1

    def encode(self, table: pa.Table) -> Ints:
        """int64 [words]: the number of each word's tag; memory-mapped if the table is.

        Raises:
            UserError: a tag does not occur in training; names the first row.
        """
        if content_of(table):
            return read_array(self._stored(table) / "tags.npy")
        return self._numbers(table, table[TAGS].combine_chunks())

    def _stored(self, table: pa.Table) -> Path:
        """The folder of the numbers of the tags of a memory-mapped table, and of the `_violations` of its batches."""

        def make(texts: range) -> Iterator[dict[str, NDArray[Any]]]:
            for _, tags in batches_of(table[TAGS], texts):
                numbers = self._numbers(table, tags)
                yield {"tags": numbers, "violations": self._violations(numbers, begins_of(sizes_of(tags)))}

        name = f"tags-{key_digest(FORMAT, content_of(table), self.names)}"
        return make_arrays(name, table.num_rows, make, {}, f"numbering the tags of {source_of(table)}")

    def _numbers(self, table: pa.Table, tags: pa.LargeListArray) -> Ints:
        """int64 [words]: see `encode`; `tags` are some rows of the table."""
        words = tags.flatten()
        found = pc.index_in(words, pa.array(self.names, words.type))
        if found.null_count:
            raise self._unknown(table)
        return found.to_numpy().astype(np.int64)

    def _unknown(self, table: pa.Table) -> UserError:
        """The error about tags that are not among the names."""
        first, rows_before, unknown = -1, 0, dict[str, None]()
        for tags in table[TAGS].chunks:
            words = tags.flatten()
            places = np.flatnonzero(pc.index_in(words, pa.array(self.names, words.type)).is_null())
            if len(places) and first < 0:
                first = rows_before + int(np.searchsorted(np.cumsum(sizes_of(tags)), places[0], side="right"))
            unknown |= dict.fromkeys(words.take(pa.array(places)).unique().to_pylist())
            rows_before += len(tags)
        return UserError(
            f"{where(table, first)} has a tag that the training data does not have (unknown: {listed([*unknown])}; "
            f"known: {listed(self.names)}): correct it, remove such rows, or add rows with these tags to the "
            "training data"
        )

    def entities(self, numbers: Ints, begins: NDArray[np.bool_]) -> Entities:
        """The entities that tags mark, by the rules of conlleval.

        These rules (Tjong Kim Sang and Buchholz, CoNLL-2000) read all schemes, and tags that violate their scheme: an
        entity starts at B and S, after O, E and S, and where the kind changes.

        Args:
            numbers: [words] the tags of all texts, one after the other.
            begins: [words] whether a word is the first of its text.
        """
        prefix, kind = self._prefixes[numbers], self._kinds[numbers]
        before, kind_before = _previous(prefix, begins, O), _previous(kind, begins, -1)
        inside = prefix != O
        starts = inside & (np.isin(prefix, (B, S)) | np.isin(before, (O, E, S)) | (kind != kind_before))
        ends = inside & np.append((starts | ~inside)[1:], True)
        first = np.flatnonzero(starts)
        return Entities(first, np.flatnonzero(ends), kind[first])

    def scheme(self, numbers: Ints, begins: NDArray[np.bool_]) -> tuple[str, int]:
        """The scheme that these tags follow, and how many of the words violate it; arguments as in `entities`."""
        return self._scheme(self._violations(numbers, begins))

    def _violations(self, numbers: Ints, begins: NDArray[np.bool_]) -> Ints:
        """int64 [3], counts of words: what violates BIOES, what violates IOB2, and each B that is not as in IOB1."""
        prefix, kind = self._prefixes[numbers], self._kinds[numbers]
        before, kind_before = _previous(prefix, begins, O), _previous(kind, begins, -1)
        open_before = np.isin(before, (B, I)) & (kind == kind_before)
        without_begin = np.isin(prefix, (I, E)) & ~open_before
        continued = np.append((np.isin(prefix, (I, E)) & open_before)[1:], False)
        of_bioes = without_begin | (np.isin(prefix, (B, I)) & ~continued)
        return np.array([of_bioes.sum(), without_begin.sum(), ((prefix == B) & ~open_before).sum()], np.int64)

    def _scheme(self, violations: Ints) -> tuple[str, int]:
        """The result of `scheme`, from the summed `_violations`."""
        of_bioes, of_iob2, not_iob1 = violations.tolist()
        if self.plain:
            return "plain", 0
        if np.isin(self._prefixes, (E, S)).any():
            return "BIOES", of_bioes
        if of_iob2 and not not_iob1:
            return "IOB1", 0  # B- only between two entities of the same kind
        return "IOB2", of_iob2

    def report_violations(self, table: pa.Table) -> None:
        """Print how many words of a table violate the scheme of their tags, if any do."""
        if content_of(table):
            violations = read_array(self._stored(table) / "violations.npy").reshape(-1, 3).sum(0)
        else:
            violations = self._violations(self.encode(table), first_words(table))
        scheme, count = self._scheme(violations)
        if count:
            say(
                f"{source_of(table)}: {count:,} tags violate {scheme} (such as I- without B- before it); entities are "
                "read by the rules of conlleval"
            )


def first_words(table: pa.Table) -> NDArray[np.bool_]:
    """bool [words]: whether a word is the first of its text; each text has a word."""
    return begins_of(sizes_of(table[WORDS].combine_chunks()))


def _distinct_tags(table: pa.Table) -> list[str]:
    """The tags of a table, in the order in which they occur; of a memory-mapped one, read once per machine."""

    def read() -> list[str]:
        found: dict[str, None] = {}
        for tags in table[TAGS].chunks:
            found |= dict.fromkeys(tags.flatten().unique().to_pylist())
        return [*found]

    if not (content := content_of(table)):
        return read()
    name = f"tag-names-{key_digest(FORMAT, content)}"
    found: list[str] = json.loads(text_once(name, "tags.json", lambda: json.dumps(read())))
    return found


def _previous(values: NDArray, begins: NDArray[np.bool_], at_begin: int) -> NDArray:
    """The value of the word before each word, and `at_begin` for the first word of a text."""
    return np.where(begins, at_begin, np.roll(values, 1))
