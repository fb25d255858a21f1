"""Windows of tagged texts: a long text is several overlapping samples, and each word belongs to one of them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shared.cache.prepared import cache_dir, key_digest, mapped_file, read_array, shared_array, text_once
from shared.datasets import arrow_files
from shared.errors import UserError, count_of
from shared.tagging.pieces import WordPieces
from shared.tagging.tags import Ints
from shared.tagging.text_blocks import BATCH_TEXTS, make_arrays

FORMAT = 1  # part of the cache's names: increase it when the files for the same input change


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
    sizes = np.diff(offsets)
    step = room - stride
    count = np.where(sizes > 0, 1 + np.maximum(0, -(-(sizes - room) // step)), 0)  # windows of each text
    text = np.repeat(np.arange(len(sizes)), count)
    number = np.arange(len(text)) - np.repeat(np.cumsum(count) - count, count)  # of a window in its text
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


def windows_of(pieces: WordPieces, room: int, stride: int, special: int) -> tuple[Windows, NDArray[np.int32]]:
    """`cut_into_windows` of all texts, and the length of each window with `special` tokens, int32 [windows].

    If the texts are large, all processes make the windows together, and they are memory-mapped.
    """

    def make(texts: range) -> Iterator[dict[str, NDArray[Any]]]:
        for start in range(texts.start, texts.stop, BATCH_TEXTS):
            end = min(start + BATCH_TEXTS, texts.stop)
            windows = cut_into_windows(pieces.offsets[start : end + 1], pieces.firsts, room, stride)
            yield vars(windows) | {"lengths": (windows.sizes + special).astype(np.int32)}

    if pieces.pieces.nbytes <= arrow_files.IN_MEMORY:
        windows = cut_into_windows(pieces.offsets, pieces.firsts, room, stride)
        return Windows(*map(stored, vars(windows).values())), stored((windows.sizes + special).astype(np.int32))
    name = f"windows-{key_digest(FORMAT, pieces.folder.name, room, stride, special)}"
    folder = make_arrays(name, len(pieces.offsets) - 1, make, {}, "cutting texts into windows")
    arrays = (read_array(folder / f"{field.name}.npy") for field in fields(Windows))
    return Windows(*arrays), read_array(folder / "lengths.npy")


class TaggedWords(Dataset):
    """Windows of tagged texts, with the tag of each window's own words at their first pieces.

    `read_micro_batch` returns the windows of a micro-batch together: (concatenated tokens [T] with special tokens,
    lengths [windows], indices of the first pieces of the windows' own words [n], tags of these words [n]). Each word
    belongs to one window, so it counts once in training and in evaluation.

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
        self,
        pieces: WordPieces,
        tags: Ints,
        max_length: int,
        stride: int,
        around: tuple[list[int], list[int]],
    ) -> None:
        self.pieces, self.tags, self.begins = pieces, stored(tags), pieces.begins
        self.before, self.after = (np.array(ids, np.int64) for ids in around)
        special = len(self.before) + len(self.after)
        room = max_length - special
        if room < 1:
            raise UserError(
                f"--max_length {max_length} leaves no room for text with {special} special tokens: increase it"
            )
        if stride >= room:
            raise UserError(
                f"--stride {stride} is not smaller than the {room} tokens of text in --max_length {max_length}: lower "
                "it, or increase --max_length"
            )
        self.windows, self.lengths = windows_of(pieces, room, stride, special)  # lengths: with special tokens
        self.num_words = self.windows.num_words  # int64 [N]: own words of each window, which have a share in the loss

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, window: int) -> Ints:
        """int64 [length]: the tokens of a window."""
        return self.read_micro_batch(np.array([window]), np.zeros(1, np.int64))[0]

    def read_micro_batch(self, samples: Ints, _: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """The windows `samples` [windows]; epochs are ignored. See the class for what is returned."""
        starts, sizes = self.windows.starts[samples], self.windows.sizes[samples]
        lengths = self.lengths[samples].astype(np.int64)
        begins = np.cumsum(lengths) - lengths  # of each window in `tokens`
        tokens = np.empty(lengths.sum(), np.int64)
        tokens[ranges(begins + len(self.before), sizes)] = self.pieces.pieces[ranges(starts, sizes)]
        tokens[begins[:, None] + np.arange(len(self.before))] = self.before
        tokens[(begins + lengths)[:, None] - np.arange(len(self.after), 0, -1)] = self.after
        words = self.words_of(samples)
        moved = np.repeat(begins + len(self.before) - starts, self.num_words[samples])
        return tokens, lengths, self.pieces.firsts[words] + moved, self.tags[self.pieces.words[words]]

    def words_of(self, samples: Ints) -> Ints:
        """int64 [n]: the own words of windows, numbered among the words with pieces, in the order of the batch."""
        return ranges(self.windows.first_words[samples], self.num_words[samples])

    def tags_of_all(self, predicted: Ints, outside: int) -> Ints:
        """int64 [words]: `predicted` [words with pieces], and the tag `outside` for the words without pieces."""
        found = np.full(len(self.tags), outside)
        found[self.pieces.words] = predicted
        return found

    def digest(self) -> str:
        """A digest of the tokens, the windows and the tags; computed once per machine, except for arrays in memory."""
        arrays: list[NDArray[Any]] = [self.pieces.pieces, self.pieces.firsts, self.pieces.words]
        arrays += [self.windows.starts, self.lengths, self.num_words, self.tags, self.begins]
        files = [file for array in arrays if (file := mapped_file(array)) and file.parent.parent == cache_dir()]

        def digest() -> str:
            content = hashlib.blake2b(digest_size=16)
            for array in arrays:
                content.update(np.ascontiguousarray(array).view(np.uint8).data)
            return content.hexdigest()

        if len(files) < len(arrays):
            return digest()
        name = f"digest-{key_digest(FORMAT, *(f'{file.parent.name}/{file.name}' for file in files))}"
        return text_once(name, "digest", digest)

    def summary(self) -> dict[str, int]:
        """The number of texts, windows and words."""
        return {"texts": int(self.begins.sum()), "windows": len(self), "words": len(self.tags)}

    def __str__(self) -> str:
        windows, words = count_of(len(self), "window"), count_of(len(self.tags), "word")
        return f"{count_of(int(self.begins.sum()), 'text')} ({windows}, {words})"


def stored(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, memory-mapped if it is large: see `shared_array`."""
    return array if mapped_file(array) else shared_array(lambda: [array], array.dtype)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """int64 [sum of counts]: start, start + 1, ..., start + count - 1 of each range, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
