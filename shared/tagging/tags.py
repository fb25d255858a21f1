"""Tags of words: their scheme, their numbers, and the entities that they mark; batches of tagged texts."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.cache.division import parts_by_size
from shared.cache.prepared import shared_array
from shared.datasets.rows import source_of, where
from shared.errors import UserError, listed

WORDS, TAGS = "tokens", "tags"  # the columns of the tables of tagged texts: see tagged_texts.py
SCORES = ("f1", "precision", "recall", "accuracy")
OUTSIDE = "O"
TAG = re.compile(r"([BIESLU])(?:-(.+))?")  # a prefix, and a kind of entity, which is missing if there is only one kind
O, B, I, E, S = range(5)  # noqa: E741  # the usual letters of the schemes
PREFIXES = {"B": B, "I": I, "E": E, "S": S, "L": E, "U": S}  # L and U are the BILOU names of E and S
BATCH_TEXTS = 1000
BATCH_WORDS = 1 << 14  # in a batch, or one text; limits the memory of the tokenizer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tags:
    """The tags in the order of the model's outputs; a tag is a number from 0, and -1 is a word outside any entity.

    IOB1, IOB2, BIOES and BILOU tags have the forms B-PER, I-PER and O, or B, I and O. With any other tag, all tags are
    plain: each word whose tag is not O is an entity.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        kinds = listed([kind for kind in self.kinds_of_entities if kind])
        return f"{len(self.names)}{' plain' * bool(self.of_no_scheme)} tags of words" + (f": {kinds}" if kinds else "")

    @classmethod
    def of(cls, table: pa.Table, class_names: Sequence[str] = ()) -> "Tags":
        """The tags of a training table: `class_names`, or the sorted tags that occur.

        Raises:
            UserError: there is only one tag.
        """
        found = sorted({tag for chunk in table[TAGS].chunks for tag in chunk.flatten().unique().to_pylist()})
        if len(found) < 2:
            raise UserError(
                f"{source_of(table)}: every word has the tag {found[0]}, so there is nothing to learn: use the column "
                "of the tags as --label_column_name, or add texts with other tags"
            )
        return cls(tuple(class_names) or tuple(found))

    @cached_property
    def of_no_scheme(self) -> list[str]:
        """The tags that have the form of no scheme; with any of them, all tags are plain."""
        return [name for name in self.names if name != OUTSIDE and not TAG.fullmatch(name)]

    @cached_property
    def kinds_of_entities(self) -> list[str]:
        """The sorted names of the kinds; for tags without kinds (B, I, O), one empty name."""
        return sorted({self._parts(name)[1] for name in self.names if name != OUTSIDE})

    def _parts(self, name: str) -> tuple[int, str]:
        """The prefix and the kind of a tag; a plain tag marks an entity of one word."""
        if name == OUTSIDE:
            return O, "\0"  # the name of no kind
        if self.of_no_scheme:
            return S, name
        prefix, kind = TAG.fullmatch(name).groups("")  # type: ignore[union-attr]  # all names match
        return PREFIXES[prefix], kind

    @property
    def outside(self) -> int:
        """The number of the tag O; -1 if no tag is O."""
        return self.names.index(OUTSIDE) if OUTSIDE in self.names else -1

    def encode(self, table: pa.Table) -> Ints:
        """int64 [words]: the number of each word's tag; memory-mapped if there are many.

        Raises:
            UserError: a tag does not occur in training; names the first row.
        """
        names = pa.array(self.names, pa.large_string())

        def numbers() -> Iterator[Ints]:
            for first, tags in batches_of_words(table[TAGS], range(table.num_rows)):
                found = pc.index_in(tags.flatten(), names)
                if found.null_count:
                    word = int(np.flatnonzero(found.is_null())[0])
                    row = first + int(np.searchsorted(np.cumsum(sizes_of(tags)), word, side="right"))
                    raise UserError(
                        f"{where(table, row)} has the tag {tags.flatten()[word]}, which the training data does not "
                        f"have (known: {listed(self.names)}): correct it, remove such rows, or add rows with this tag "
                        "to the training data"
                    )
                yield found.to_numpy()

        return shared_array(numbers, np.int64)

    def entities(self, numbers: Ints, begins: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """The first word, the last word and the number of the kind of each entity that tags mark: [entities] each.

        The rules of conlleval (Tjong Kim Sang and Buchholz, CoNLL-2000) read all schemes, and tags that violate their
        scheme: an entity starts at B and S, after O, E and S, and where the kind changes.

        Args:
            numbers: [words] the tags of all texts, one after the other.
            begins: [words] whether a word is the first of its text.
        """
        number_of = {kind: number for number, kind in enumerate(self.kinds_of_entities)}
        parts = [*map(self._parts, (*self.names, OUTSIDE))]  # the last ones are those of -1
        prefix = np.array([prefix for prefix, _ in parts], np.int8)[numbers]
        kind = np.array([number_of.get(kind, -1) for _, kind in parts])[numbers]
        before = np.where(begins, O, np.roll(prefix, 1))  # in the text
        same_kind = ~begins & (kind == np.roll(kind, 1))
        inside = prefix != O
        starts = inside & (np.isin(prefix, (B, S)) | np.isin(before, (O, E, S)) | ~same_kind)
        ends = inside & np.append((starts | ~inside)[1:], True)
        first = np.flatnonzero(starts)
        return first, np.flatnonzero(ends), kind[first]


def batches_of_words(lists: pa.ChunkedArray, texts: range) -> Iterator[tuple[int, pa.LargeListArray]]:
    """The words or tags of a range of texts in batches, each with the number of its first text."""
    for start in range(texts.start, texts.stop, BATCH_TEXTS):
        some = lists.slice(start, min(BATCH_TEXTS, texts.stop - start)).combine_chunks()
        for part in parts_by_size(sizes_of(some), BATCH_WORDS):
            yield start + part.start, some.slice(part.start, len(part))


def sizes_of(lists: pa.Array) -> NDArray[np.int64]:
    """int64 [texts]: the lengths of lists."""
    return np.asarray(pc.list_value_length(lists)).astype(np.int64)


def begins_of(sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [words]: whether a word is the first of its text; a text may have no words. `sizes`: words of each text."""
    found = np.zeros(sizes.sum(), bool)
    found[(np.cumsum(sizes) - sizes)[sizes > 0]] = True
    return found


def tagging_scores(tags: Tags, predicted: Ints, true: Ints, begins: NDArray[np.bool_]) -> dict[str, float]:
    """SCORES by name. An entity is found if its first word, last word and kind are predicted; 0 / 0 is 0.

    Args:
        tags: the meaning of the numbers.
        predicted, true: [words] the tags of all texts, one after the other; -1 is a word outside any entity.
        begins: [words] whether a word is the first of its text.
    """
    first, last, kind = tags.entities(predicted, begins)
    true_first, true_last, true_kind = tags.entities(true, begins)
    last_of, kind_of = np.full((2, len(true)), -1)  # of the true entity that begins at a word
    last_of[true_first], kind_of[true_first] = true_last, true_kind
    hits = int(((last_of[first] == last) & (kind_of[first] == kind)).sum())
    precision, recall = hits / max(1, len(first)), hits / max(1, len(true_first))
    f1 = 2 * hits / max(1, len(first) + len(true_first))
    accuracy = float((predicted == true).mean())
    return dict(zip(SCORES, (f1, precision, recall, accuracy), strict=True))
