"""A corpus as tokens with the offsets of its documents: streamed to disk once, then memory-mapped.

The files contain the documents' own tokens only. Documents are cut into pieces, and special tokens are added, when the
files are read, so the same files work for every --max_length.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shared.cache.division import Division, parts_of
from shared.cache.prepared import Arrays, key_digest, ranges, read_array, text_once
from shared.errors import UserError, say
from shared.pretrained.tokenizers import check_unknown
from shared.text.documents import BLOCK_ROWS, Documents
from shared.text.encoder import Encoder
from shared.text.masking import Masking
from shared.text.pieces import Selection, cut_into_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shared.text.remote_tokens import RemoteTokens

DIGESTED = 1 << 20  # lengths of documents that are digested at once

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents of a corpus, on this machine or behind a URL."""

    folder: Path  # on this machine
    digest: str  # of the tokens and of the lengths of the documents
    remote: "RemoteTokens | None" = None  # the tokens, if they are not in the folder

    @property
    def offsets(self) -> Ints:
        """int64 [documents + 1], memory-mapped: where each document begins in `tokens`, and the end of `tokens`."""
        return read_array(self.folder / "offsets.npy")

    @property
    def tokens(self) -> "NDArray[np.integer] | RemoteTokens":
        """All tokens; slices of them are arrays."""
        return self.remote or read_array(self.folder / "tokens.npy")


def tokenize_documents(documents: Documents, tokenizer: "PreTrainedTokenizerBase") -> Corpus:
    """The tokens of the documents, without special tokens; "[MASK]" in a text is tokenized as text.

    All processes that call this divide the work, also those of other machines with the same cache folder: see
    `division.py`. This needs as much memory as some hundred documents. The cache is keyed by the content. Documents
    without tokens are skipped, with a message.

    Raises:
        UserError: the documents have no tokens, all tokens are unknown, or the tokenizer is not a fast one.
        Unfinished: see `Division.build`.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer: use a model with a tokenizer.json")
    encoder = Encoder(tokenizer, None)

    def make(rows: range) -> Iterator[Arrays]:
        for texts in documents.batches(rows):
            ids, lengths, _ = encoder.encode(texts)
            unknown = np.array([np.count_nonzero(ids == encoder.unknown)])
            skipped = np.array([np.count_nonzero(lengths == 0)])
            offsets = np.cumsum(lengths[lengths > 0])
            yield {"tokens": ids, "offsets": offsets, "unknown": unknown, "skipped": skipped}

    division = Division(
        f"corpus-{key_digest(encoder.identity, documents.content)}",
        parts_of(len(documents.texts), BLOCK_ROWS),
        make,
        f"tokenizing {documents.source}",
        places={"offsets": "tokens"},
        first={"tokens": np.empty(0, encoder.id_type), "offsets": np.zeros(1, np.int64)},
        threads=encoder.threads,
    )
    folder = division.build()
    corpus = Corpus(folder, text_once(f"digest-{folder.name}", "digest", lambda: _digest(folder)))
    skipped, unknown = (int(read_array(folder / f"{name}.npy").sum()) for name in ("skipped", "unknown"))
    if not len(corpus.tokens):
        raise UserError(f"{documents.source} contains no text: its {skipped:,} documents have no tokens")
    if skipped:
        say(f"{documents.source}: {skipped:,} documents without text are skipped")
    check_unknown(documents.source, unknown, len(corpus.tokens))
    return corpus


def _digest(folder: Path) -> str:
    """A digest of the tokens and of the lengths of the documents."""
    content = hashlib.blake2b(read_array(folder / "tokens.npy").data, digest_size=16)
    offsets = read_array(folder / "offsets.npy")
    for start in range(0, len(offsets) - 1, DIGESTED):
        content.update(np.diff(offsets[start : start + DIGESTED + 1]).data)
    return content.hexdigest()


class MaskedDocuments(Dataset):
    """Pieces of documents with masked tokens.

    A sample is a piece of at most `max_length` tokens, including special tokens. A longer document continues in the
    next piece, so no token is lost. `read_micro_batch` returns the pieces of a micro-batch together: (concatenated
    tokens [T], lengths [pieces], indices of the masked tokens [n], their original ids [n]).

    Args:
        file: the tokens.
        documents: the documents to use.
        max_length: tokens of a piece.
        around: ids before and after each piece.
        masking: how tokens are chosen and replaced.
        seed: determines the masked tokens, together with epoch and piece.

    Raises:
        UserError: `max_length` leaves no room for text.
    """

    def __init__(
        self,
        file: Corpus,
        documents: Selection,
        max_length: int,
        around: tuple[list[int], list[int]],
        masking: Masking,
        seed: int,
    ) -> None:
        self.arguments = (file, documents, max_length, around, masking, seed)
        self.file = file
        self.before, self.after = (np.array(ids, np.int64) for ids in around)
        self.masking, self.seed = masking, seed
        special = len(self.before) + len(self.after)
        room = max_length - special
        if room < 1:
            raise UserError(
                f"--max_length {max_length} leaves no room for text with {special} special tokens: increase it"
            )
        pieces = cut_into_pieces(file.digest, file.offsets, documents, max_length, special, masking)
        self.tokens, self.starts = file.tokens, pieces.starts
        self.samples_ahead = file.remote.samples_ahead if file.remote else 0  # for the loader: when to `prefetch`
        self.lengths, self.masked = pieces.lengths, pieces.masked  # int32 [N], memory-mapped: see `Pieces`
        self.longest, self.num_tokens = pieces.longest, pieces.total

    def __len__(self) -> int:
        return len(self.lengths)

    def digest(self) -> str:
        """A digest of the tokens of all documents and the number of pieces: different data have a different digest."""
        return f"{self.arguments[0].digest}-{len(self)}"

    def prefetch(self, samples: Ints) -> None:
        """Begin to read the pieces `samples` [pieces], if the tokens are not on this machine."""
        if self.file.remote:
            self.file.remote.prefetch(self.starts[samples], self._sizes(samples))

    def _sizes(self, samples: Ints) -> Ints:
        """The tokens of pieces without special tokens."""
        return self.lengths[samples].astype(np.int64) - len(self.before) - len(self.after)

    def __getitem__(self, piece: int) -> Ints:
        """int64 [length]: a piece without masking."""
        size = self.lengths[piece] - len(self.before) - len(self.after)
        text = self.tokens[self.starts[piece] : self.starts[piece] + size]
        return np.concatenate([self.before, text.astype(np.int64), self.after])

    def read_micro_batch(self, samples: Ints, epochs: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """The pieces `samples` [pieces], masked for `epochs` [pieces]; see the class for what is returned."""
        sizes = self._sizes(samples)
        lengths = sizes + len(self.before) + len(self.after)
        self.prefetch(samples)
        spans = (self.tokens[start : start + size] for start, size in zip(self.starts[samples], sizes, strict=True))
        tokens = np.concatenate([part for span in spans for part in (self.before, span, self.after)])
        owner = np.repeat(np.arange(len(samples)), sizes)
        place = ranges(np.zeros_like(sizes), sizes)
        where = ranges(np.cumsum(lengths) - lengths + len(self.before), sizes)  # of each token of the texts
        text = tokens[where]
        chosen = self.masking.choose(text, sizes, self.seed, epochs, samples)
        labels, whose = text[chosen], owner[chosen]
        tokens[where[chosen]] = self.masking.replace(labels, self.seed, epochs[whose], samples[whose], place[chosen])
        return tokens, lengths, where[chosen], labels

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self.arguments
