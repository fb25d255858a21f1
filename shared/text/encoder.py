"""Tokenization of batches of texts into flat arrays."""

import os
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.cache.division import cores_of_process
from shared.pretrained.tokenizers import threads_off, unknown_token
from shared.processes.ending import local_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 5  # part of the names of tokens in the cache: increase it when the files for the same texts change


class Encoder:
    """Converts texts to token ids, without transformers' wrapper where possible, because that doubles the time.

    Args:
        tokenizer: its settings do not change.
        max_length: tokens of a row, with special tokens. None: whole texts without special tokens, in which "[MASK]" is
            text; the tokenizer must be a fast one.
        prompt: put before each text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int | None, prompt: str = "") -> None:
        self.tokenizer, self.max_length, self.prompt = tokenizer, max_length, prompt
        self.id_type = np.uint16 if max(tokenizer.get_vocab().values()) <= np.iinfo(np.uint16).max else np.int32
        self.with_types = max_length is not None and "token_type_ids" in tokenizer.model_input_names
        self.unknown = -1 if (found := unknown_token(tokenizer)) is None else found
        self.fast: Tokenizer | None = None
        as_text = max_length is None or tokenizer.split_special_tokens
        if tokenizer.is_fast:
            self.fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, whose settings may change
            self.fast.no_padding()
            self.fast.no_truncation()
            if max_length is not None:
                self.fast.enable_truncation(max_length, direction=tokenizer.truncation_side)
            self.fast.encode_special_tokens = as_text
            content = self.fast.to_str().encode()
        else:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                content = b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
        settings = FORMAT, tokenizers.__version__, max_length, as_text, self.with_types, self.unknown
        self.identity = repr((*settings, type(tokenizer).__name__)).encode() + content + prompt.encode()
        self.threads = min(2, cores_of_process()) if self.fast and not threads_off() else 1  # one of them converts
        if local_processes() > 1:  # the threads of tokenizers; it keeps their number if it has already started them
            os.environ.setdefault("RAYON_NUM_THREADS", str(cores_of_process()))

    def encode(self, batch: list[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint8]]:
        """The concatenated token ids, the number of tokens in each row (int64), and the token types (uint8)."""
        if self.prompt:
            batch = [self.prompt + text for text in batch]
        if self.fast:
            encodings = self.fast.encode_batch_fast(batch, add_special_tokens=self.max_length is not None)
            ids = [encoding.ids for encoding in encodings]
            types = [encoding.type_ids for encoding in encodings] if self.with_types else []
        else:
            pairs = list(zip(*batch, strict=True)) if isinstance(batch[0], tuple) else [batch]
            encoded = self.tokenizer(*map(list, pairs), truncation=True, max_length=self.max_length)
            ids, types = encoded["input_ids"], encoded.get("token_type_ids", [])
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = lengths.sum()
        flat = np.fromiter(chain.from_iterable(ids), self.id_type, total)
        return flat, lengths, np.fromiter(chain.from_iterable(types), np.uint8, total if self.with_types else 0)
