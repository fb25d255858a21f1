"""Words as pieces of a tokenizer, on disk: made once per machine, then memory-mapped."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from tqdm import tqdm

from shared.cache.prepared import build_once
from shared.datasets.rows import source_of
from shared.errors import UserError, say
from shared.pretrained.tokenizers import check_unknown, unknown_token
from shared.tagging.tags import WORDS, Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # part of the cache's names: increase it when the files for the same input change
BATCH_TEXTS = 1000


@dataclass(frozen=True)
class WordPieces:
    """The pieces of the words of all texts, without special tokens, in memory-mapped files.

    A word without pieces (such as a zero-width space) has no entry in `firsts` and `words`.
    """

    folder: Path

    @cached_property
    def pieces(self) -> NDArray[np.uint32]:
        """[pieces] token ids."""
        return _mapped(self.folder / "pieces.npy")

    @cached_property
    def offsets(self) -> Ints:
        """[texts + 1] where each text begins in `pieces`, and the end of `pieces`."""
        return _mapped(self.folder / "offsets.npy")

    @cached_property
    def firsts(self) -> Ints:
        """[words with pieces] the place of the first piece of each word in `pieces`."""
        return _mapped(self.folder / "firsts.npy")

    @cached_property
    def words(self) -> Ints:
        """[words with pieces] the number of each word among all words of the table."""
        return _mapped(self.folder / "words.npy")


def as_texts(table: pa.Table) -> pa.Table:
    """A table with the column "text": the words of each row, separated by spaces; to train a tokenizer on."""
    texts = [" ".join(words) for words in table[WORDS].to_pylist()]
    return pa.table({"text": pa.array(texts, pa.large_string())}).replace_schema_metadata(table.schema.metadata)


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

    The first process of a machine writes them, with a progress bar; the others wait and read. The cache is keyed by
    words and tokenizer. The number of words without pieces is printed.

    Raises:
        UserError: no word has pieces, or all pieces are unknown.
    """
    fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, because its settings are changed
    fast.no_padding()
    fast.no_truncation()
    fast.encode_special_tokens = True
    unknown_id = -1 if (found := unknown_token(tokenizer)) is None else found
    texts = table[WORDS].combine_chunks()
    lengths = np.asarray(pc.list_value_length(texts))
    settings = repr((FORMAT, tokenizers.__version__, unknown_id)).encode() + fast.to_str().encode()

    def build(folder: Path) -> None:
        ids, owners = [], []  # arrays [pieces] for each text: token ids, and numbers of words in the text
        with tqdm(total=len(texts), desc=f"tokenizing {source_of(table)}", unit=" texts", mininterval=0.5) as bar:
            for start in range(0, len(texts), BATCH_TEXTS):
                batch = texts.slice(start, BATCH_TEXTS).to_pylist()
                for encoding in fast.encode_batch(batch, is_pretokenized=True, add_special_tokens=False):
                    ids.append(np.array(encoding.ids, np.uint32))
                    owners.append(np.array(encoding.word_ids, np.int64))
                bar.update(len(batch))
        sizes = np.fromiter(map(len, ids), np.int64, len(ids))
        words_before = np.cumsum(lengths) - lengths
        pieces, words = np.concatenate(ids), np.concatenate(owners) + np.repeat(words_before, sizes)
        if not len(pieces):
            raise UserError(f"{source_of(table)}: the tokenizer gives no word a token: use another model")
        firsts = np.flatnonzero(np.diff(words, prepend=-1))
        arrays = {"pieces": pieces, "offsets": np.append(0, np.cumsum(sizes)), "firsts": firsts, "words": words[firsts]}
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        (folder / "unknown").write_text(f"{np.count_nonzero(pieces == unknown_id)} {len(pieces)}")

    cut = WordPieces(build_once(f"words-{_digest(settings, texts)}", build))
    if lost := int(lengths.sum()) - len(cut.words):
        say(f"{source_of(table)}: {lost:,} words have no tokens; the evaluation counts the tag O as their prediction")
    check_unknown(source_of(table), *map(int, (cut.folder / "unknown").read_text().split()))
    return cut


def _digest(settings: bytes, texts: pa.LargeListArray) -> str:
    """A digest of settings and words."""
    words = texts.flatten()
    digest = hashlib.blake2b(settings, digest_size=16)
    digest.update(np.ascontiguousarray(pc.list_value_length(texts)).data)
    digest.update(np.ascontiguousarray(pc.binary_length(words)).data)
    offsets = np.frombuffer(words.buffers()[1], np.int64)[words.offset : words.offset + len(words) + 1]
    digest.update(memoryview(words.buffers()[2])[offsets[0] : offsets[-1]])
    return digest.hexdigest()


def _mapped(path: Path) -> NDArray:
    # A plain array over the mapping, because slicing an np.memmap takes several times as long.
    return np.load(path, mmap_mode="r").view(np.ndarray)
