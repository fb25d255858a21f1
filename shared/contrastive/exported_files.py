"""The files with which the exported model/ of a run also loads in the library sentence-transformers."""

import json
from pathlib import Path
from typing import Any

from shared.contrastive.pooling import Pooling

# The names of sentence-transformers 2 to 5, which version 6 also accepts.
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
POOLINGS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


class SentenceTokenizer:
    """A tokenizer whose `save_pretrained` also writes the files of sentence-transformers.

    Args:
        tokenizer: of transformers.
        pooling: how the embedding of a text is computed.
        width: of an embedding.
        max_length: maximum number of tokens of a text.
    """

    def __init__(self, tokenizer: Any, pooling: Pooling, width: int, max_length: int) -> None:
        self.tokenizer, self.pooling, self.width, self.max_length = tokenizer, pooling, width, max_length

    def save_pretrained(self, folder: Path) -> None:
        """Write the files of the tokenizer, the list of modules and their settings."""
        self.tokenizer.save_pretrained(folder)
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(MODULES)
        ]
        pooling = {"word_embedding_dimension": self.width} | {
            flag: name == self.pooling for name, flag in POOLINGS.items()
        }
        files = {
            "modules.json": modules,
            "1_Pooling/config.json": pooling,
            "2_Normalize/config.json": {},
            "sentence_bert_config.json": {"max_seq_length": self.max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "__version__": {},
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
