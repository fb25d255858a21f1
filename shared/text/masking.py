"""Masking for masked language modeling: the choice of tokens and replacements.

Both are functions of (seed, epoch, document, place). The number of masked tokens is a function of the document's
length, so each process knows the normalizer of a step's loss without communication. All documents of a micro-batch are
masked together.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from shared.errors import UserError
from shared.plan.draws import Ints, hash64

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE, REPLACEMENT, RANDOM_TOKEN = 3, 4, 5  # last hash word of each kind of draw; the loader and dropout use 1 and 2


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen and replaced.

    Of the chosen tokens, `mask_share` become the mask token, `random_share` become a random token, and the others stay
    unchanged: 0.8 and 0.1 in BERT (arXiv:1810.04805); 1 and 0 replace all by the mask token. `probability` is 0.15 in
    BERT, and 0.3 in newer work (Wettig et al., arXiv:2202.08005; MosaicBERT, arXiv:2312.17482).
    """

    probability: float  # share of a document's tokens that are chosen
    mask_share: float
    random_share: float
    mask_token: int
    random_tokens: Ints  # ids from which random tokens are drawn
    continues_word: NDArray[np.bool_] | None = None  # [ids] whether a token continues a word; None: mask single tokens

    def counts(self, num_tokens: Ints) -> Ints:
        """int64 [N]: how many tokens are chosen in documents with `num_tokens` [N] tokens: rounded, at least 1."""
        return np.maximum(1, np.floor(self.probability * num_tokens + 0.5).astype(np.int64))

    def choose(self, tokens: NDArray[np.integer], lengths: Ints, seed: int, epochs: Ints, documents: Ints) -> Ints:
        """Ascending indices of the chosen `tokens`: `counts(lengths)` in each document.

        Whole words are chosen in random order until the count is reached, so the last word may be chosen in part.

        Args:
            tokens: [T] the concatenated tokens of the documents, without special tokens.
            lengths: [documents] the number of tokens in each document, at least 1.
            seed: determines the draw, together with `epochs` and `documents`.
            epochs: [documents].
            documents: [documents] their numbers.
        """
        ends = np.cumsum(lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
        unit = place
        if self.continues_word is not None:
            begins = ~self.continues_word[tokens] | (place == 0)
            unit = place[begins][np.cumsum(begins) - 1]  # the place where the token's word begins
        draws = _hash(seed, epochs[owner], documents[owner], unit, PLACE)
        order = np.lexsort((draws, owner))  # stable: keeps the order of the tokens in a word
        return np.sort(order[place < self.counts(lengths)[owner]])  # `place` counts from 0 in each document

    def replace(
        self, tokens: NDArray[np.integer], seed: int, epochs: Ints, documents: Ints, places: Ints
    ) -> NDArray[np.int64]:
        """int64 [n]: the replacements of n chosen tokens; all arguments except `seed` are [n]."""
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
    """The `Masking` for these flags and this tokenizer.

    Raises:
        UserError: the probabilities add up to more than 1, or the tokenizer has no mask token, or does not mark where
            words begin.
    """
    if mask_share + random_share > 1 + 1e-9:
        raise UserError(
            f"--mask_replace_prob {mask_share} and --random_replace_prob {random_share} add up to more than 1: "
            "lower one of them"
        )
    if tokenizer.mask_token_id is None:
        raise UserError("--model_name_or_path: its tokenizer has no mask token: use another model")
    special = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab()
    ordinary = np.array(sorted(set(vocabulary.values()) - special), np.int64)
    continues = _continues_word(vocabulary) if whole_words else None
    return Masking(probability, mask_share, random_share, tokenizer.mask_token_id, ordinary, continues)


def _continues_word(vocabulary: dict[str, int]) -> NDArray[np.bool_]:
    """bool [ids]: which tokens continue a word: "##…" in WordPiece; without a leading space mark in BPE and Unigram."""
    found = np.zeros(max(vocabulary.values()) + 1, bool)
    names = list(vocabulary)
    # The most frequent one, because BPE has tokens such as "###", the heading of Markdown.
    count, mark = max((sum(name.startswith(mark) for name in names), mark) for mark in ("##", "Ġ", "▁"))
    if count < 2:
        raise UserError("--whole_word_masking: the tokenizer does not mark where words begin: remove the flag")
    if mark == "##":
        found[[vocabulary[name] for name in names if name.startswith("##") and len(name) > 2]] = True
    else:
        texts = {name: name for name in names if name and not name.startswith((mark, "Ċ", "ĉ"))}  # line feed, tab
        if mark == "Ġ":
            # Byte-level BPE (Radford et al., "GPT-2") writes bytes as symbols, and a token may begin or end inside a
            # character: "ĢĢĢ" completes its last one, and the rest of another one counts as a letter.
            decoder = decoders.ByteLevel()
            texts = {name: decoder.decode([name + "ĢĢĢ"]).replace("\N{REPLACEMENT CHARACTER}", "a") for name in texts}
        found[[vocabulary[name] for name, text in texts.items() if text[0].isalnum()]] = True
    return found
