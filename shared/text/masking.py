"""Which tokens of a document are hidden and what stands there instead: a function of (seed, epoch, document, place).

The number of hidden tokens of a document is exact and follows from its length, so that every process knows the
normalizer of a step's loss without asking the others. All documents of a micro-batch are drawn at once.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.errors import UserError
from shared.plan.hashing import hash64

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = NDArray[np.int64]
PLACE, REPLACEMENT, RANDOM_TOKEN = 3, 4, 5  # the last word of each kind of draw; 1 and 2 are the loader's and dropout's


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden.

    Of the chosen ones `mask_share` become the mask token, `random_share` another token, and the rest stay as they are:
    0.8 and 0.1 in BERT (arXiv:1810.04805), 1 and 0 to hide all of them. How many are chosen: 0.15 in BERT, 0.3 since
    Wettig et al. (arXiv:2202.08005) and MosaicBERT (arXiv:2312.17482).
    """

    probability: float  # share of a document's tokens that are chosen
    mask_share: float
    random_share: float
    mask_token: int
    random_tokens: Ints  # the ids that a random token is taken from
    continues_word: NDArray[np.bool_] | None = None  # [ids] whether a token goes on with the word before it

    def counts(self, num_tokens: Ints) -> Ints:
        """How many tokens of documents with `num_tokens` are chosen, both int64 [N]: the nearest number, at least 1."""
        return np.maximum(1, np.floor(self.probability * num_tokens + 0.5).astype(np.int64))

    def choose(self, tokens: NDArray[np.integer], lengths: Ints, seed: int, epochs: Ints, documents: Ints) -> Ints:
        """Where tokens are chosen: ascending indices into `tokens`, `counts(lengths)` of them in each document.

        Args:
            tokens: [T] the documents' tokens end to end, without special tokens.
            lengths: [documents] tokens of each, at least 1.
            seed, epochs, documents: what decides the draw; the latter two [documents].

        Whole words come in random order until the number is reached; the last one may be chosen in part.
        """
        ends = np.cumsum(lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
        unit = place
        if self.continues_word is not None:
            begins = ~self.continues_word[tokens] | (place == 0)
            unit = place[begins][np.cumsum(begins) - 1]  # the place where the token's word begins
        draws = _hash(seed, epochs[owner], documents[owner], unit, PLACE)
        order = np.lexsort((draws, owner))  # stable: the tokens of a word stay in their order
        return np.sort(order[place < self.counts(lengths)[owner]])  # `place` counts from 0 in each document

    def replace(
        self, tokens: NDArray[np.integer], seed: int, epochs: Ints, documents: Ints, places: Ints
    ) -> NDArray[np.int64]:
        """What stands in place of chosen tokens, int64 [n]; all arguments but `seed` are [n], one per chosen token."""
        share = _hash(seed, epochs, documents, places, REPLACEMENT) / 2.0**64
        which = _hash(seed, epochs, documents, places, RANDOM_TOKEN) % np.uint64(len(self.random_tokens))
        other = np.where(share < self.mask_share + self.random_share, self.random_tokens[which], tokens)
        return np.where(share < self.mask_share, self.mask_token, other)


def _hash(seed: int, *words: Ints | int) -> NDArray[np.uint64]:
    return hash64(seed, *(word if isinstance(word, int) else word.astype(np.uint64) for word in words))


def masking_for(
    tokenizer: "PreTrainedTokenizerBase",
    probability: float,
    mask_share: float = 1.0,
    random_share: float = 0.0,
    whole_words: bool = False,
) -> Masking:
    """The masking that flags and tokenizer ask for.

    Raises:
        UserError: the tokenizer has no mask token or does not mark words; probabilities that cannot be.
    """
    if mask_share + random_share > 1 + 1e-9:
        raise UserError(
            f"--mask_replace_prob {mask_share} and --random_replace_prob {random_share} are together more than 1: "
            "lower one of them"
        )
    if tokenizer.mask_token_id is None:
        raise UserError(
            "--model_name_or_path: its tokenizer has no mask token, so it cannot be trained to fill it in: take another"
        )
    special = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab()
    ordinary = np.array(sorted(set(vocabulary.values()) - special), np.int64)
    if not len(ordinary):
        raise UserError(
            "--model_name_or_path: its tokenizer knows no words, so there is nothing to fill in: take another"
        )
    continues = _continues_word(vocabulary) if whole_words else None
    return Masking(probability, mask_share, random_share, tokenizer.mask_token_id, ordinary, continues)


def _continues_word(vocabulary: dict[str, int]) -> NDArray[np.bool_]:
    """Which ids go on with a word: "##…" of WordPiece; what does not begin with a mark of space in BPE and Unigram."""
    found = np.zeros(max(vocabulary.values()) + 1, bool)
    names = list(vocabulary)
    if any(name.startswith("##") for name in names):
        found[[vocabulary[name] for name in names if name.startswith("##") and len(name) > 2]] = True
    elif spaces := [mark for mark in ("Ġ", "▁") if sum(name.startswith(mark) for name in names) > 1]:
        breaks = (*spaces, "Ċ", "ĉ")  # space, line feed and tab, as byte-level BPE writes them
        first = _first_of_bytes if "Ġ" in spaces else _first
        found[[i for name, i in vocabulary.items() if not name.startswith(breaks) and first(name).isalnum()]] = True
    else:
        raise UserError("--whole_word_masking: the tokenizer does not mark where words begin: leave the flag out")
    return found


def _first(name: str) -> str:
    """The first character of a token; "" of an empty one."""
    return name[:1]


def _first_of_bytes(name: str) -> str:
    """The same for byte-level BPE (Radford et al., "GPT-2"), whose tokens are bytes written as symbols.

    A token may begin or end inside of a character. One that begins inside gives a letter, since it goes on with what
    came before; one that ends inside gives the first character that it can be the beginning of.
    """
    symbols = _byte_symbols()
    begun = bytes(symbols.get(symbol, 0) for symbol in name[:4])
    if begun and 0x80 <= begun[0] < 0xC0:
        return "a"
    ends = (b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80\x80")  # of the first character by its first byte
    possible = [(begun + end).decode(errors="replace")[0] for end in ends] if begun else []
    return next((character for character in possible if character != "\N{REPLACEMENT CHARACTER}"), "")


@cache
def _byte_symbols() -> dict[str, int]:
    """{symbol: byte}: visible characters of Latin-1 stand for themselves, the others are counted on from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
