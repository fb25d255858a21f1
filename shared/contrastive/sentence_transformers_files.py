"""Models of the library sentence-transformers: the files with which it loads model/, and checks of those it wrote."""

import json
from pathlib import Path
from typing import Any

from shared.contrastive.pooling import Pooling
from shared.errors import UserError, say

# The names of sentence-transformers 2 to 5, which version 6 also accepts.
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
POOLINGS: dict[Pooling, str] = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
SETTINGS_FILE = "config_sentence_transformers.json"


def stored_settings(folder: Path) -> tuple[str, int | None]:
    """The pooling and the maximum number of tokens of the model of sentence-transformers in `folder`.

    The pooling is one of `POOLINGS`, or in other cases what the model names.

    Raises:
        UserError: its vectors are computed in another way than by an encoder, a pooling and normalization.
    """

    def read(file: Path) -> Any:
        return json.loads(file.read_text()) if file.is_file() else {}

    modules = {module["type"].rpartition(".")[2]: module["path"] for module in read(folder / MODULES_FILE)}
    lengths, prompt = read(folder / LENGTH_FILE), read(folder / SETTINGS_FILE).get("default_prompt_name")
    pooling = read(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    flags = [flag for flag in pooling if "pooling_mode" in flag and pooling[flag]]
    named = pooling.get("pooling_mode") or flags
    stored = " ".join([named] if isinstance(named, str) else named)
    problem = None
    if others := modules.keys() - {kind for _, kind in MODULES}:
        problem = f"has the modules {', '.join(sorted(others))}"
    elif lengths.get("do_lower_case"):
        problem = f"has do_lower_case in its {LENGTH_FILE}"
    elif prompt is not None:
        problem = f"adds the prompt {prompt} to each text"
    if problem:
        raise UserError(
            f"{folder}: this model of sentence-transformers {problem}, which is not supported: use the library, or a "
            "model with an encoder, the mean over tokens or the first token, and normalization"
        )
    known = {flag: name for name, flag in POOLINGS.items()}
    return known.get(stored, stored), lengths.get("max_seq_length")


def check_modules(name: str, pooling: Pooling) -> None:
    """Check a model of sentence-transformers in the local folder `name`; print a message if its pooling is another.

    Raises:
        UserError: see `stored_settings`.
    """
    if (Path(name) / MODULES_FILE).exists():
        stored, _ = stored_settings(Path(name))
        if stored not in ("", pooling):
            say(f"--model_name_or_path {name} was trained with another pooling ({stored}): --pooling {pooling} is used")


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
            MODULES_FILE: modules,
            "1_Pooling/config.json": pooling,
            "2_Normalize/config.json": {},
            LENGTH_FILE: {"max_seq_length": self.max_length, "do_lower_case": False},
            SETTINGS_FILE: {
                "__version__": {},
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
