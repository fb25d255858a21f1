"""Words as pieces of a tokenizer, on disk, and windows of texts: a long text is several overlapping samples.

All processes make the pieces together; then they are memory-mapped. Each word belongs to one window.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from torch.utils.data import Dataset

from shared.cache.division import Division, parts_of
from shared.cache.prepared import key_digest, ranges, read_array, shared_array
from shared.datasets.rows import content_of, converted, source_of
from shared.errors import UserError, count_of, say
from shared.pretrained.tokenizers import check_unknown
from shared.tagging.tags import BATCH_TEXTS, WORDS, Ints, batches_of_words, begins_of, sizes_of
from shared.text.encoder import Encoder
from shared.text.tokenized import Rows, room_for_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # part of the cache's names: increase it when the files for the same input change
PLACES = {"offsets": "pieces", "firsts": "pieces", "words": "begins"}  # see `Division`
SMALLEST_BLOCK = 4096  # texts; the default data are one block
CONTEXT = 24  # pieces before and after a word


@dataclass(frozen=True)
class WordPieces:
    """The pieces of the words of all texts, without special tokens, in memory-mapped files.

    A word without pieces (such as a zero-width space) has no entry in `firsts` and `words`.
    """

    pieces: NDArray[np.uint32]  # [pieces] token ids
    offsets: Ints  # [texts + 1] where each text begins in `pieces`, and the end of `pieces`
    firsts: Ints  # [words with pieces] the place of the first piece of each word in `pieces`
    words: Ints  # [words with pieces] the number of each word among all words of the table
    begins: NDArray[np.bool_]  # [words] whether a word is the first of its text; of all words of the table


def as_texts(table: pa.Table) -> pa.Table:
    """A table with the column "text": the words of each row, separated by spaces; to train a tokenizer on."""

    def convert(block: pa.Table) -> pa.Table:
        return pa.table({"text": pc.binary_join(block[WORDS], pa.scalar(" ", pa.large_string()))})

    return converted(table, convert, "texts", FORMAT)


def begin_words_with_a_space(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Make a byte-level tokenizer cut a word alone into the same pieces as after a space, and return it.

    Byte-level tokenizers (RoBERTa, ModernBERT) have different pieces for the beginning of a word with and without a
    space before it, and were trained on texts with spaces. The exported tokenizer has the same setting.

    Raises:
        UserError: the tokenizer is not a fast one.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer: use a model with a tokenizer.json")
    fast = tokenizer.backend_tokenizer
    if isinstance(fast.pre_tokenizer, pre_tokenizers.ByteLevel):
        spaced = fast.pre_tokenizer
        spaced.add_prefix_space = True
        fast.pre_tokenizer = spaced
        tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True  # as the exported files need it
    return tokenizer


def cut_words(table: pa.Table, tokenizer: "PreTrainedTokenizerBase") -> WordPieces:
    """The pieces of the words of a table; "[MASK]" in a text is cut as text.

    All processes that call this divide the texts: see `Division`. The number of words without pieces is printed.

    Args:
        table: has the column of words.
        tokenizer: a fast one.

    Raises:
        UserError: no word has pieces, or all pieces are unknown.
        Unfinished: this process is a task of a job array and has cut its share, and another task has not.
    """
    encoder = Encoder(tokenizer, None)
    fast = encoder.fast
    assert fast

    def make(texts: range) -> Iterator[dict[str, NDArray[Any]]]:
        for _, batch in batches_of_words(table[WORDS], texts):
            encodings = fast.encode_batch(batch.to_pylist(), is_pretokenized=True, add_special_tokens=False)
            of_texts, words_of_texts = sizes_of(batch), [np.array(each.word_ids, np.int64) for each in encodings]
            ends = np.cumsum([len(each) for each in words_of_texts])
            words_before = np.cumsum(of_texts) - of_texts
            pieces = np.concatenate([np.array(each.ids, np.uint32) for each in encodings])
            words = np.concatenate(words_of_texts) + np.repeat(words_before, np.diff(ends, prepend=0))
            firsts = np.flatnonzero(np.diff(words, prepend=-1))
            yield {
                "pieces": pieces,
                "offsets": ends,
                "firsts": firsts,
                "words": words[firsts],
                "begins": begins_of(of_texts),
                "unknown": np.array([np.count_nonzero(pieces == encoder.unknown)]),
            }

    source = source_of(table)
    content = content_of(table) or table[WORDS].to_pylist()  # the words of a memory-mapped table are not read
    parts = parts_of(table.num_rows, SMALLEST_BLOCK)
    name = f"words-{key_digest(FORMAT, encoder.identity, content)}"
    begin = {"offsets": np.zeros(1, np.int64)}
    folder = Division(name, parts, make, f"tokenizing {source}", PLACES, begin).build()
    cut = WordPieces(*(read_array(folder / f"{field.name}.npy") for field in fields(WordPieces)))
    if not len(cut.pieces):
        raise UserError(f"{source}: the tokenizer gives no word a token: use another model")
    if lost := len(cut.begins) - len(cut.words):
        say(f"{source}: {count_of(lost, 'word')} without tokens; the evaluation counts the tag O as their prediction")
    check_unknown(source, int(read_array(folder / "unknown.npy").sum()), len(cut.pieces))
    return cut


@dataclass(frozen=True)
class Windows:
    """Windows of texts, in their order: int64 arrays [windows]."""

    starts: Ints  # the first piece of each
    sizes: Ints  # the number of its pieces
    first_words: Ints  # the first of its own words, an index of `firsts`
    num_words: Ints  # the number of its own words, at least 1


def cut_into_windows(offsets: Ints, firsts: Ints, room: int, stride: int) -> Windows:
    """Cut texts into windows of at most `room` pieces.

    Consecutive windows of a text share `stride` pieces; the last two share more if necessary, so that the last one is
    full, too. Each word belongs to one window: the one in which its first piece is farthest from the nearest end of the
    window; of two such windows, the earlier one. The beginning and the end of the text do not count as ends of a
    window. Windows without words of their own are left out.

    Args:
        offsets: [texts + 1] where each text begins in the pieces, and the end of the pieces.
        firsts: [words] the first piece of each word, ascending.
        room: the largest number of pieces in a window.
        stride: smaller than `room`.
    """
    sizes, step = np.diff(offsets), room - stride
    count = np.where(sizes > 0, 1 + np.maximum(0, -(-(sizes - room) // step)), 0)  # windows of each text
    text = np.repeat(np.arange(len(sizes)), count)
    number = ranges(np.zeros_like(count), count)  # of a window in its text
    begins = np.minimum(number * step, np.maximum(sizes - room, 0)[text])  # in the text
    ends = np.minimum(begins + room, sizes[text])
    # The words of a window begin from the middle of its overlap with the window before to that with the next one.
    middle = (begins[1:] + ends[:-1] + 1) // 2
    same_text = text[1:] == text[:-1]
    own_from = np.append(0, np.where(same_text, middle, 0))[: len(text)]
    own_to = np.append(np.where(same_text, middle, ends[:-1]), ends[-1:])
    here = offsets[:-1][text]
    first_words, end_words = (np.searchsorted(firsts, here + bound) for bound in (own_from, own_to))
    kept = end_words > first_words
    arrays = (here + begins, ends - begins, first_words, end_words - first_words)
    return Windows(*(array[kept] for array in arrays))


def windows_of(offsets: Ints, firsts: Ints, room: int, stride: int) -> Windows:
    """`cut_into_windows` of many texts, block by block; memory-mapped if there are many windows."""
    starts = range(0, len(offsets) - 1, BATCH_TEXTS)
    parts = [cut_into_windows(offsets[start : start + BATCH_TEXTS + 1], firsts, room, stride) for start in starts]
    columns = ([getattr(part, field.name) for part in parts] for field in fields(Windows))
    return Windows(*(shared_array(column.copy, np.int64) for column in columns))


class TaggedWords(Dataset):
    """Windows of tagged texts between special tokens, with the tag of each window's own words at their first pieces.

    The targets are the tags of the windows' own words, at the first pieces of these words. Each word belongs to one
    window, so it counts once in training and in evaluation.

    Args:
        pieces: the pieces of all texts.
        tags: int64 [words] the tag of each word of the table, also of those without pieces.
        max_length: tokens of a window, with special tokens.
        stride: pieces that consecutive windows of a text share.
        around: ids of the special tokens before and after each window.

    Raises:
        UserError: `max_length` or `stride` leave no room for text.
    """

    def __init__(
        self, pieces: WordPieces, tags: Ints, max_length: int, stride: int, around: tuple[list[int], list[int]]
    ) -> None:
        self.pieces, self.firsts, self.tags, self.begins = pieces, pieces.firsts, tags, pieces.begins
        self.before, self.after = (np.array(ids, np.int64) for ids in around)
        special = len(self.before) + len(self.after)
        room = room_for_text(max_length, special)
        if room <= stride:
            raise UserError(
                f"--max_length {max_length} leaves room for {room} tokens of text beside {special} special tokens, not "
                f"more than --stride {stride}: increase it, or lower --stride"
            )
        self.windows = windows_of(pieces.offsets, pieces.firsts, room, stride)
        self.lengths = shared_array(lambda: [self.windows.sizes + special], np.int32)  # [windows] tokens of each
        self.num_words = self.windows.num_words  # int64 [windows]: own words, which have a share in the loss

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, window: int) -> Ints:
        """int64 [length]: the tokens of a window."""
        samples = np.array([window])
        return self.read_micro_batch(samples, samples).ids

    def words_of(self, samples: Ints) -> Ints:
        """int64 [n]: the own words of windows, numbered as in `firsts`, in the order of the batch."""
        return ranges(self.windows.first_words[samples], self.num_words[samples])

    def read_micro_batch(self, samples: Ints, _: Ints) -> Rows:
        """The windows `samples` [windows]; epochs are ignored."""
        starts, sizes = self.windows.starts[samples], self.windows.sizes[samples]
        lengths = self.lengths[samples].astype(np.int64)
        begins = np.cumsum(lengths) - lengths  # of each window in `tokens`
        tokens = np.empty(lengths.sum(), np.int64)
        tokens[ranges(begins + len(self.before), sizes)] = self.pieces.pieces[ranges(starts, sizes)]
        tokens[begins[:, None] + np.arange(len(self.before))] = self.before
        tokens[(begins + lengths)[:, None] - np.arange(len(self.after), 0, -1)] = self.after
        words = self.words_of(samples)
        shifts = begins + len(self.before) - starts  # of the place of a piece
        places = self.firsts[words] + np.repeat(shifts, self.num_words[samples])
        return Rows(lengths, tokens, targets=self.tags[self.pieces.words[words]], masked=places)

    def tags_of_all(self, predicted: Ints, outside: int) -> Ints:
        """int64 [words]: `predicted` [words with pieces], and the tag `outside` for the words without pieces."""
        found = np.full(len(self.tags), outside)
        found[self.pieces.words] = predicted
        return found

    def in_context(self, tokenizer: Any, word: int) -> dict[str, str]:
        """A word, numbered as in `firsts`, as a text, and the text `before` and `after` it."""
        first, offsets = int(self.firsts[word]), self.pieces.offsets
        text = int(np.searchsorted(offsets, first, side="right"))
        begin, end = max(int(offsets[text - 1]), first - CONTEXT), min(int(offsets[text]), first + CONTEXT)
        after = min(end, int(self.firsts[word + 1])) if word + 1 < len(self.firsts) else end
        spans = {"before": (begin, first), "text": (first, after), "after": (after, end)}
        decoded = {name: tokenizer.decode(self.pieces.pieces[slice(*span)]) for name, span in spans.items()}
        return decoded | {"before": decoded["before"] + " ", "after": " " + decoded["after"]}

    def digest(self) -> str:
        """A digest of the tokens, the windows and the tags."""
        pieces, windows = self.pieces, self.windows
        content = hashlib.blake2b(digest_size=16)
        arrays: list[NDArray[Any]] = [pieces.pieces, pieces.firsts, pieces.words, windows.starts, self.lengths]
        for array in (*arrays, self.num_words, self.tags, self.begins):
            content.update(np.ascontiguousarray(array).view(np.uint8).data)
        return content.hexdigest()

    def __str__(self) -> str:
        windows, words = count_of(len(self), "window"), count_of(len(self.tags), "word")
        return f"{count_of(int(self.begins.sum()), 'text')} ({windows}, {words})"
