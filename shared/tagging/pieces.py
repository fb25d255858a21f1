"""Words as pieces of a tokenizer, on disk: made by all processes together, then memory-mapped."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from shared.cache.division import Division, parts_of
from shared.cache.prepared import key_digest, read_array
from shared.datasets import arrow_files
from shared.datasets.rows import content_of, source_of
from shared.errors import UserError, say
from shared.pretrained.tokenizers import check_unknown
from shared.tagging.tags import WORDS, Ints, batches_of, begins_of, sizes_of
from shared.text.encoder import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # part of the cache's names: increase it when the files for the same input change
PLACES = {"offsets": "pieces", "firsts": "pieces", "words": "begins"}  # see `Division`
SMALLEST_BLOCK = 4096  # texts; the default data are one block


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

    return arrow_files.converted(table, convert, "texts", FORMAT)


def begin_words_with_a_space(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Make a byte-level tokenizer cut a word alone into the same pieces as after a space, and return it.

    Byte-level tokenizers (RoBERTa, ModernBERT) have different pieces for the beginning of a word with and without a
    space before it, and were trained on texts with spaces. The exported tokenizer has the same setting. If a tokenizer
    keeps the difference, a message is printed.

    Raises:
        UserError: the tokenizer is not a fast one.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"--model_name_or_path: {type(tokenizer).__name__} is a slow tokenizer, which does not tell which piece "
            "belongs to which word: use a model with a tokenizer.json"
        )
    fast = tokenizer.backend_tokenizer
    if isinstance(fast.pre_tokenizer, pre_tokenizers.ByteLevel):
        spaced = fast.pre_tokenizer
        spaced.add_prefix_space = True
        fast.pre_tokenizer = spaced
        tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True  # as the exported files need it
    together = fast.encode("the word", add_special_tokens=False).ids
    if fast.encode(["the", "word"], is_pretokenized=True, add_special_tokens=False).ids != together:
        say(
            f"warning: {type(tokenizer).__name__} cuts words into other pieces than in a text with spaces, which may "
            "cost accuracy: a model with another tokenizer may be better"
        )
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
        for _, batch in batches_of(table[WORDS], texts):
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
        say(f"{source}: {lost:,} words have no tokens; the evaluation counts the tag O as their prediction")
    check_unknown(source, int(read_array(folder / "unknown.npy").sum()), len(cut.pieces))
    return cut
