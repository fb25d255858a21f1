"""Tables of texts as flat arrays of tokens, cached on disk; padding of batches; training of new tokenizers."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset

from shared.cache.division import Division, parts_of
from shared.cache.prepared import Arrays, build_once, cache_dir, key_digest, mapped_file, ranges, read_array, text_once
from shared.datasets.rows import missing, source_of, where
from shared.errors import UserError
from shared.pretrained.tokenizers import OFFSET_POSITIONS, check_unknown
from shared.text.encoder import Encoder, batches_of_texts, columns_in_batches, digest_of_texts, refuse_empty, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FORMAT = 3  # part of the names of tokenizers in the cache: increase it when training gives another tokenizer
BLOCK_ROWS = 1 << 12  # of a table, or more: 0.2 s of one core for texts of 150 characters
BLOCK_DOCUMENTS = 1 << 10  # of a corpus, whose texts are longer
COUNTED = 1 << 14  # texts whose lengths are looked at for the launch card
SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}

Item = tuple[np.ndarray, np.ndarray | None, Any]  # one row: input_ids [n], token_type_ids [n], target
Lengths = TypeVar("Lengths", NDArray[np.int64], np.int64)


class Rows(NamedTuple):
    """The texts of a micro-batch as one array of each kind."""

    lengths: NDArray[np.int64]  # [rows]
    ids: NDArray[Any]  # integers [T], all tokens
    types: NDArray[Any] | None = None  # [T]
    targets: NDArray[Any] | None = None  # [rows, ...], or [n] of single tokens
    masked: NDArray[np.int64] | None = None  # [n], ascending: where in `ids` the tokens with a target are


class TokenizedText(Dataset):
    """Token ids of the rows of a table, in memory-mapped files, with the targets.

    An item is (input_ids [n], token_type_ids [n] or None, target or None), views of NumPy arrays. `Padding` makes a
    batch from a list of items, or from the result of `read_micro_batch`. Workers are forked and share the files.

    Args:
        folder: of the files.
        targets: [N, ...].
    """

    def __init__(self, folder: Path, targets: np.ndarray | None = None) -> None:
        self.folder = folder
        self.targets = targets
        self.input_ids = read_array(folder / "tokens.npy")
        self.offsets = read_array(folder / "offsets.npy")
        types = folder / "token_type_ids.npy"
        self.token_type_ids = read_array(types) if types.exists() else None
        self.lengths: NDArray[np.int32] = read_array(folder / "lengths.npy")  # [N] tokens
        assert self.targets is None or len(self.targets) == len(self)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Item:
        span = slice(self.offsets[row], self.offsets[row + 1])
        types = None if self.token_type_ids is None else self.token_type_ids[span]
        return self.input_ids[span], types, None if self.targets is None else self.targets[row]

    def read_micro_batch(self, samples: NDArray[np.int64], _: NDArray[np.int64]) -> Rows:
        """The items of `samples` as one array of each kind, in a third of the time; epochs are ignored."""
        lengths = self.lengths[samples].astype(np.int64)
        tokens = ranges(self.offsets[samples], lengths)
        types = None if self.token_type_ids is None else self.token_type_ids[tokens]
        return Rows(lengths, self.input_ids[tokens], types, None if self.targets is None else self.targets[samples])

    def digest(self) -> str:
        """A digest of the tokens and the targets; computed once per machine, except for targets in memory."""
        file = None if self.targets is None else mapped_file(self.targets)
        if (self.targets is not None and not file) or self.folder.parent != cache_dir():
            return self._digest()
        key = key_digest(self.folder.name, file and file.parent.name)
        return text_once(f"digest-{key}", "digest", self._digest)

    def _digest(self) -> str:
        content = hashlib.blake2b(digest_size=16)
        for array in (self.offsets, self.input_ids, self.token_type_ids, self.targets):
            content.update(b"" if array is None else np.ascontiguousarray(array).view(np.uint8).data)
        return content.hexdigest()

    def with_targets(self, targets: np.ndarray) -> "TokenizedText":
        """The same tokens with `targets` [N, …], such as the result of `Labels.encode`."""
        return TokenizedText(self.folder, targets)


@dataclass(frozen=True)
class Padding:
    """Collates texts: pads to the longest row, rounded up to a multiple but not beyond a maximum."""

    pad_token_id: int
    multiple_of: int = 1
    max_length: int | None = None
    left: bool = False  # whether the padding comes before the text
    packed: ClassVar[bool] = False
    draws_random: ClassVar[bool] = False

    def padded_lengths(self, lengths: Lengths) -> Lengths:
        """The cost of rows in tokens, int64 [N] or one: their lengths rounded up, but not beyond `max_length`."""
        rounded = -(-lengths // self.multiple_of) * self.multiple_of
        return rounded if self.max_length is None else np.maximum(lengths, np.minimum(rounded, self.max_length))

    def __call__(self, rows: Rows | list[Item]) -> dict[str, torch.Tensor]:
        """int64 [rows, longest]: input_ids, attention_mask, token_type_ids if there are any; also labels [rows, …].

        If single tokens have targets: labels [n], and masked [n], their indices in the flattened rows.
        """
        lengths, ids, types, targets, masked = rows if isinstance(rows, tuple) else joined(rows)
        real = np.arange(int(self.padded_lengths(lengths.max()))) < lengths[:, None]
        real = real[:, ::-1] if self.left else real
        arrays = {"input_ids": np.full(real.shape, self.pad_token_id), "attention_mask": real.astype(np.int64)}
        arrays["input_ids"][real] = ids
        if types is not None:
            arrays["token_type_ids"] = np.zeros(real.shape, np.int64)
            arrays["token_type_ids"][real] = types
        if targets is not None:
            arrays["labels"] = targets
        if masked is not None:
            arrays["masked"] = np.flatnonzero(real)[masked]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def joined(items: list[Item]) -> Rows:
    """Concatenated items, in the form of `TokenizedText.read_micro_batch`."""
    ids, types, targets = zip(*items, strict=True)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    all_types = None if types[0] is None else np.concatenate(types)
    return Rows(lengths, np.concatenate(ids), all_types, None if targets[0] is None else np.array(targets))


def room_for_text(max_length: int, special: int) -> int:
    """The tokens of text in a row of at most `max_length`; UserError if `special` tokens leave no room for text."""
    if max_length <= special:
        raise UserError(f"--max_length {max_length} leaves no room for text with {special} special tokens: increase it")
    return max_length - special


def tokenize(
    table: pa.Table,
    text_columns: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int | None,
    prompt: str = "",
) -> TokenizedText:
    """The tokens of one text column, or of the text pairs in two columns, truncated to `max_length` by the tokenizer.

    The texts of one column may get a prompt before them. All processes that call this divide the rows: see `Division`.
    Without `max_length`, texts are whole and have no special tokens, and rows without text or tokens are left out.

    Raises:
        UserError: a column does not exist or is not text, a row has no text or no tokens, all words are unknown, or
            `max_length` leaves no room for text.
        Unfinished: see `Division.build`.
    """
    columns = texts_of(table, text_columns)
    whole = max_length is None
    special = 0 if whole else tokenizer.num_special_tokens_to_add(pair=len(text_columns) == 2)
    if max_length is not None:
        room_for_text(max_length, special)
    encoder = Encoder(tokenizer, max_length, prompt)

    def make(rows: range) -> Iterator[Arrays]:
        part = columns.slice(rows.start, len(rows))
        if not whole and any(missing(table.slice(rows.start, len(rows)), name).any() for name in text_columns):
            refuse_empty(table, text_columns)
        row = rows.start
        for batch in batches_of_texts(part):
            ids, lengths, types = encoder.encode(batch)
            if not whole and not lengths.all():
                raise UserError(
                    f"{where(table, row + int(lengths.argmin()))} has a text without tokens: remove the row"
                )
            row += len(batch)
            unknown = np.array([np.count_nonzero(ids == encoder.unknown)])
            lengths = lengths[lengths > 0]
            arrays = {"tokens": ids, "offsets": np.cumsum(lengths), "lengths": lengths.astype(np.int32)}
            yield arrays | {"unknown": unknown} | ({"token_type_ids": types} if encoder.with_types else {})

    division = Division(
        f"tokens-{key_digest(encoder.identity, digest_of_texts(table, columns))}",
        parts_of(table.num_rows, BLOCK_DOCUMENTS if whole else BLOCK_ROWS),
        make,
        f"tokenizing {source_of(table)}",
        places={"offsets": "tokens"},
        first={"tokens": np.empty(0, encoder.id_type), "offsets": np.zeros(1, np.int64)},
        threads=encoder.threads,
    )
    data = TokenizedText(division.build())
    unknown = int(read_array(data.folder / "unknown.npy").sum())
    check_unknown(source_of(table), unknown, len(data.input_ids) - special * len(data))
    return data


def cut_off(lengths: NDArray[np.integer], max_length: int) -> str:
    """The share of the texts that reach `max_length`, for the launch card; "" if none does. `lengths` are int [N].

    Of more than COUNTED texts some are counted, evenly spread, so that a start takes no longer with more texts.
    """
    some = lengths[:: 1 + len(lengths) // COUNTED]
    share = np.count_nonzero(some >= max_length) / len(some)
    return f" ({100 * share:.3g} % reach --max_length {max_length}, where texts are cut off)" if share else ""


def train_tokenizer(
    table: pa.Table, text_columns: Sequence[str], kind: Literal["wordpiece", "bpe"], vocab_size: int, max_length: int
) -> "PreTrainedTokenizerFast":
    """A tokenizer for single texts and pairs, trained on the texts of a table: the same on every machine.

    It is case-sensitive, because case distinguishes code and names from prose. WordPiece can encode words of the
    characters in the training texts; BPE works on bytes and can encode any text.

    Raises:
        UserError: a column does not exist or is not text, a row has no text, or single characters alone fill
            `vocab_size`.
    """
    from transformers import PreTrainedTokenizerFast

    columns = texts_of(table, text_columns)

    def build(folder: Path) -> None:
        refuse_empty(table, text_columns)
        train = _train_wordpiece if kind == "wordpiece" else _train_bpe
        tokenizer = train(columns, vocab_size)
        if tokenizer.get_vocab_size() > vocab_size:
            raise UserError(
                f"--vocab_size {vocab_size} is too small: special tokens and single characters of {source_of(table)} "
                f"need {tokenizer.get_vocab_size():,} entries: increase it"
            )
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
        )
        tokenizer.save(str(folder / "tokenizer.json"))

    key = key_digest(FORMAT, tokenizers.__version__, kind, vocab_size, digest_of_texts(table, columns))
    folder = build_once(f"tokenizer-{key}", build)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],  # no token_type_ids: [SEP] separates the texts of a pair
        **SPECIAL_TOKENS,
    )


def _train_bpe(columns: pa.Table, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(columns_in_batches(columns), trainer, columns.num_rows * columns.num_columns)
    return tokenizer


def _train_wordpiece(columns: pa.Table, vocab_size: int) -> Tokenizer:
    """A WordPiece tokenizer with the same vocabulary in every process.

    The trainer of the library numbers the pieces "##a" in the order of a randomly seeded hash map and breaks ties
    between merges by these numbers, so two runs get different vocabularies (tokenizers#1794). Special tokens are
    numbered first, in their order. Therefore all "##" characters are declared as special tokens for training. A second
    tokenizer, in which they are not special, gets the resulting vocabulary.
    """
    normalizer = normalizers.BertNormalizer(lowercase=False)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters: set[str] = set()
    for texts in columns_in_batches(columns):
        characters.update(*texts)

    def words(text: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]

    inside_words = [c for c in sorted(characters) if words(f"a{c}") == [f"a{c}"]]

    special_tokens = list(SPECIAL_TOKENS.values())
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizer
    numbered_first = special_tokens + [f"##{character}" for character in inside_words]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=numbered_first)
    trained.train_from_iterator(columns_in_batches(columns), trainer, columns.num_rows * columns.num_columns)

    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special_tokens)
    return tokenizer


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", config: Any) -> None:
    """Raise UserError if the tokenizer has ids for which a model with this `PretrainedConfig` has no embedding."""
    largest, embeddings = max(tokenizer.get_vocab().values()), getattr(config, "vocab_size", math.inf)
    if largest >= embeddings:  # CANINE has no vocabulary
        raise UserError(
            f"--model_name_or_path: the tokenizer has ids up to {largest:,}, but the model has only {embeddings:,} "
            "embeddings: use model and tokenizer of the same folder"
        )


def check_max_length(max_length: int, config: Any) -> None:
    """Raise UserError if `max_length` exceeds the positions of a model with this `PretrainedConfig`."""
    positions = getattr(config, "max_position_embeddings", None) or 0
    if positions <= 0:  # relative positions have no maximum
        return
    if config.model_type in OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    if max_length > positions:
        raise UserError(f"--max_length {max_length} exceeds the model's {positions:,} positions: lower it")
