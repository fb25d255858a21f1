"""Documents of random tokens and a tokenizer of made-up words: the same for a recipe and its peers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CLS, SEP = 2, 3
FIRST_WORD = 5  # the ids below are those of special tokens


def random_words(count: int, vocabulary: int) -> NDArray[np.uint16]:
    """Ids of `count` random words."""
    return np.random.default_rng(0).integers(FIRST_WORD, vocabulary, count).astype(np.uint16)


def random_rows(documents: int, length: int, vocabulary: int) -> NDArray[np.int64]:
    """Documents between [CLS] and [SEP], int64 [documents, length]."""
    words = random_words(documents * (length - 2), vocabulary).reshape(documents, length - 2).astype(np.int64)
    return np.pad(words, ((0, 0), (1, 1)), constant_values=((0, 0), (CLS, SEP)))


def word_tokenizer(size: int) -> Any:
    """A tokenizer of `size` made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, "a", *(f"w{i}" for i in range(size - 6))]
    fast = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", CLS), ("[SEP]", SEP)]
    fast.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=fast, **dict(zip(names, special, strict=True)))
