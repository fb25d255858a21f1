"""Models of the library sentence-transformers: the files with which it loads model/, and checks of those it wrote."""

import json
from pathlib import Path
from typing import Any

from shared.contrastive.pooling import Pooling
from shared.errors import UserError, say

# The names of sentence-transformers 2 to 5, which version 6 also accepts.
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
POOLINGS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


def check_modules(name: str, pooling: Pooling) -> None:
    """Check a model of sentence-transformers in the local folder `name`; print a message if its pooling is another.

    Raises:
        UserError: the model has modules that this recipe would leave out, such as a linear layer after the pooling.
    """
    file = Path(name) / "modules.json"
    if not file.exists():
        return
    listed = json.loads(file.read_text())
    modules = {module["type"].rpartition(".")[2]: Path(name) / module["path"] for module in listed}
    if others := modules.keys() - {kind for _, kind in MODULES}:
        raise UserError(
            f"--model_name_or_path {name}: this model of sentence-transformers has the modules {', '.join(modules)}, "
            f"and this recipe would leave out {', '.join(sorted(others))}: use a model without it"
        )
    settings = json.loads((modules["Pooling"] / "config.json").read_text()) if "Pooling" in modules else {}
    stored = settings.get("pooling_mode") or [flag for flag in settings if "pooling_mode" in flag and settings[flag]]
    if stored and stored not in (pooling, [pooling], [POOLINGS[pooling]]):
        words = stored if isinstance(stored, str) else " ".join(stored)
        say(f"--model_name_or_path {name} was trained with another pooling ({words}): --pooling {pooling} is used")


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
