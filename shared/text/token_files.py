"""A corpus as files of tokens with the offsets of its documents: streamed to disk once, then memory-mapped.

The files contain the documents' own tokens only. Documents are cut into pieces, and special tokens are added, when the
files are read, so the same files work for every --max_length.
"""

import bisect
import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from shared.cache.prepared import build_once
from shared.datasets.documents import Batches, Documents
from shared.errors import UserError
from shared.pretrained.tokenizers import check_unknown, threads_off, unknown_token
from shared.text.masking import Masking
from shared.text.pieces import Selection, cut_into_pieces
from shared.text.shards import build_shards, facts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 5  # part of the cache's names: increase it when the files for the same input change
BATCH_CHARACTERS = 1 << 18  # in a batch of texts: the tokenizer needs about 30 bytes of memory for each
IN_FLIGHT = 4  # batches read ahead: they keep the tokenizer busy and need little memory
MOST_MAPPED = 512  # shards that a process maps at once: each takes a file descriptor, of which it may have 1,024

Ints = NDArray[np.int64]


class Tokens:
    """The tokens of a corpus as one array, uint16 or uint32; the files of its shards are memory-mapped when read.

    Args:
        files: one per shard.
        counts: the number of tokens in each.
        dtype: of a token.
    """

    samples_ahead = 0  # how many samples before they are needed `prefetch` should be called; 0: never

    def __init__(self, files: Sequence[Path], counts: Sequence[int], dtype: Any) -> None:
        self.files, self.dtype = files, np.dtype(dtype)
        self.ends = np.cumsum([0, *counts]).tolist()  # where each shard begins, and the end of the last one
        self.mapped: dict[int, NDArray[np.integer]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, span: slice) -> NDArray[np.integer]:
        """The tokens of a slice without a step; not copied if they are in one shard, as those of a document are."""
        start, stop, _ = span.indices(len(self))
        shard = bisect.bisect_right(self.ends, start) - 1
        if start < stop <= self.ends[shard + 1]:
            return self._within(shard, start - self.ends[shard], stop - self.ends[shard])
        found = []
        while start < stop:
            shard = bisect.bisect_right(self.ends, start) - 1
            until = min(stop, self.ends[shard + 1])
            found.append(self[start:until])
            start = until
        return np.concatenate(found) if found else np.empty(0, self.dtype)

    def prefetch(self, starts: Ints, sizes: Ints) -> None:
        """Begin to read spans of tokens; there is nothing to do for files on this machine."""

    def _within(self, shard: int, first: int, end: int) -> NDArray[np.integer]:
        """The tokens `first` ... `end` - 1 of a shard."""
        if shard not in self.mapped:
            if len(self.mapped) >= MOST_MAPPED:
                del self.mapped[next(iter(self.mapped))]  # the one that was mapped first
            self.mapped[shard] = mapped(self.files[shard], self.dtype)
        return self.mapped[shard][first:end]


class TokenizedCorpus(Protocol):
    """The tokens of all documents of a corpus, on this machine (`TokenFile`) or elsewhere (`PreparedCorpus`)."""

    @property
    def offsets(self) -> Ints:
        """int64 [documents + 1], memory-mapped: where each document begins in `tokens`, and the end of `tokens`."""

    @property
    def tokens(self) -> Tokens:
        """All tokens."""

    @property
    def digest(self) -> str:
        """A digest of the tokens and of the lengths of the documents."""


@dataclass(frozen=True)
class TokenFile:
    """The tokens of all documents of a corpus, on disk: the folder of an index, which names the folders of the shards.

    index.json has the type of the tokens, and for each shard its folder, relative to that of the index, with the number
    of its tokens.
    """

    folder: Path

    @property
    def offsets(self) -> Ints:
        """int64 [documents + 1], memory-mapped: where each document begins in `tokens`, and the end of `tokens`."""
        return mapped(self.folder / "offsets", np.int64)

    @property
    def tokens(self) -> Tokens:
        """All tokens."""
        index = json.loads((self.folder / "index.json").read_text())
        files = [self.folder / name / "tokens" for name, _ in index["shards"]]
        return Tokens(files, [count for _, count in index["shards"]], index["dtype"])

    @property
    def digest(self) -> str:
        """A digest of the tokens and of the lengths of the documents."""
        return (self.folder / "digest").read_text()


def tokenize_documents(documents: Documents, tokenizer: "PreTrainedTokenizerBase") -> TokenFile:
    """The tokens of one corpus: see `tokenize_corpora`."""
    return tokenize_corpora([documents], tokenizer)[0]


def tokenize_corpora(corpora: Sequence[Documents], tokenizer: "PreTrainedTokenizerBase") -> list[TokenFile]:
    """The tokens of the documents, without special tokens; "[MASK]" in a text is tokenized as text.

    All processes that call this divide the work, also those of other machines with the same cache folder: see
    `shards.py`. This needs as much memory as some hundred documents. The cache is keyed by the content. Documents
    without tokens are skipped, with a message.

    Raises:
        UserError: the documents have no tokens, all tokens are unknown, or the tokenizer is not a fast one.
        Unfinished: see `build_shards`.
    """
    encoder = _Encoder(tokenizer)
    parts = [documents.parts() for documents in corpora]
    sources = " and ".join(documents.source for documents in corpora)
    shards = build_shards([*chain.from_iterable(parts)], encoder.identity, encoder.write_shard, sources)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return [
        _indexed(documents, encoder, [*chain.from_iterable(shards[first:last])])
        for documents, (first, last) in zip(corpora, pairwise(ends), strict=True)
    ]


class _Encoder:
    """Writes the token ids of texts."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer: use a model with a tokenizer.json")
        self.fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, because its settings are changed
        self.fast.no_padding()
        self.fast.no_truncation()
        self.fast.encode_special_tokens = True
        largest = max(tokenizer.get_vocab().values())
        self.dtype = np.dtype(np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)
        self.unknown = -1 if (found := unknown_token(tokenizer)) is None else found
        settings = repr((FORMAT, tokenizers.__version__, self.dtype.name, self.unknown)).encode()
        self.identity = hashlib.blake2b(settings + self.fast.to_str().encode()).digest()

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], Ints, int]:
        """The concatenated ids, the number of ids in each text that has any, and the number of texts."""
        ids = [encoding.ids for encoding in self.fast.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(chain.from_iterable(ids), self.dtype, lengths.sum())
        return flat, lengths[lengths > 0], len(texts)

    def write_shard(self, folder: Path, batches: Batches, count: Callable[[int], object]) -> dict[str, int]:
        """Write `tokens`, and `lengths`, int64 [documents with tokens]; return the numbers that the index adds up."""
        facts = {"read": 0, "tokens": 0, "unknown": 0}
        with (folder / "tokens").open("wb") as tokens, (folder / "lengths").open("wb") as to_lengths:
            for flat, lengths, read in _in_order(self.encode, _small_batches(batches)):
                flat.tofile(tokens)
                lengths.tofile(to_lengths)
                unknown = int(np.count_nonzero(flat == self.unknown))
                for name, more in (("read", read), ("tokens", len(flat)), ("unknown", unknown)):
                    facts[name] += more
                count(read)
        return facts


def _indexed(documents: Documents, encoder: _Encoder, shards: list[Path]) -> TokenFile:
    """Join the shards of a corpus by an index, unless it exists, and print what is remarkable about the documents."""

    def build(folder: Path) -> None:
        facts = [facts_of(shard) for shard in shards]
        read, end, unknown = (sum(each[name] for each in facts) for name in ("read", "tokens", "unknown"))
        if not end:
            raise UserError(f"{documents.source} contains no text: its {read:,} documents have no tokens")
        content = hashlib.blake2b(digest_size=16)
        for shard in shards:
            content.update(mapped(shard / "tokens", encoder.dtype).data)
        begin = written = 0
        with (folder / "offsets").open("wb") as offsets:
            np.zeros(1, np.int64).tofile(offsets)
            for shard in shards:
                lengths = mapped(shard / "lengths", np.int64)
                content.update(lengths.data)
                (begin + np.cumsum(lengths)).tofile(offsets)
                begin, written = begin + int(lengths.sum()), written + len(lengths)
        assert begin == end
        index = [(f"../{shard.name}", each["tokens"]) for shard, each in zip(shards, facts, strict=True)]
        (folder / "index.json").write_text(json.dumps({"dtype": encoder.dtype.name, "shards": index}))
        (folder / "left_out").write_text(str(read - written))
        (folder / "unknown").write_text(f"{unknown} {end}")
        (folder / "digest").write_text(content.hexdigest())

    name = hashlib.blake2b(encoder.identity + documents.content().encode(), digest_size=16).hexdigest()
    file = TokenFile(build_once(f"corpus-{name}", build))
    if (left_out := (file.folder / "left_out").read_text()) != "0" and os.environ.get("RANK", "0") == "0":
        print(f"{documents.source}: {int(left_out):,} documents without text are skipped", file=sys.stderr)
    check_unknown(documents.source, *map(int, (file.folder / "unknown").read_text().split()))
    return file


def mapped(path: Path, dtype: Any) -> NDArray:
    """A file as a memory-mapped array."""
    # A plain array over the mapping, because slicing an np.memmap takes several times as long. A file of no bytes
    # cannot be mapped.
    return np.memmap(path, dtype, "r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)


def _small_batches(batches: Iterator[list[str | None]]) -> Iterator[list[str]]:
    """The same texts in lists of at least one text and about BATCH_CHARACTERS; "" for None and white space."""
    texts: list[str] = []
    size = 0
    for text in chain.from_iterable(batches):
        texts.append(text if text and not text.isspace() else "")
        size += len(texts[-1])
        if size > BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _in_order(function: Any, items: Iterator[Any]) -> Iterator[Any]:
    """Yield `function(item)` in order, from two threads: one tokenizes (without the GIL), the other prepares texts.

    With TOKENIZERS_PARALLELISM=false, neither the library nor this function uses threads.
    """
    if threads_off():
        yield from map(function, items)
        return
    pending: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def special_tokens_around(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text, such as [CLS] and [SEP].

    Raises:
        UserError: it adds special tokens in another way.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise UserError(f"{type(tokenizer).__name__} does not put its special tokens around a text: use another model")


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
        file: TokenizedCorpus,
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
        self.lengths, self.masked = pieces.lengths, pieces.masked  # int32 [N], memory-mapped: see `Pieces`
        self.longest, self.num_tokens = pieces.longest, pieces.total

    def __len__(self) -> int:
        return len(self.lengths)

    def digest(self) -> str:
        """A digest of the tokens of all documents and the number of pieces: different data have a different digest."""
        return f"{self.arguments[0].digest}-{len(self)}"

    def summary(self) -> dict[str, int]:
        """The number of pieces, and of tokens in them."""
        return {"pieces": len(self), "tokens": self.num_tokens}

    @property
    def samples_ahead(self) -> int:
        """How many samples before they are needed `prefetch` should be called; 0: never."""
        return self.tokens.samples_ahead

    def prefetch(self, samples: Ints) -> None:
        """Begin to read the pieces `samples` [pieces], if the tokens are not on this machine."""
        self.tokens.prefetch(self.starts[samples], self._sizes(samples))

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
        starts = self.starts[samples]
        self.tokens.prefetch(starts, sizes)
        spans = [self.tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        text = np.concatenate(spans).astype(np.int64)
        chosen = self.masking.choose(text, sizes, self.seed, epochs, samples)
        owner = np.repeat(np.arange(len(samples)), sizes)
        first = np.cumsum(sizes) - sizes
        place = np.arange(len(text)) - first[owner]
        labels, whose = text[chosen], owner[chosen]
        text[chosen] = self.masking.replace(labels, self.seed, epochs[whose], samples[whose], place[chosen])

        begins = np.cumsum(lengths) - lengths
        where = begins[owner] + len(self.before) + place  # index of each token of the text in `tokens`
        tokens = np.empty(lengths.sum(), np.int64)
        tokens[where] = text
        tokens[begins[:, None] + np.arange(len(self.before))] = self.before
        tokens[(begins + lengths)[:, None] - np.arange(len(self.after), 0, -1)] = self.after
        return tokens, lengths, where[chosen], labels

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self.arguments
