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


def modules_of(folder: Path) -> dict[str, Path]:
    """The folders of the modules of a model of sentence-transformers, by their kinds."""
    modules = read_json(folder / MODULES_FILE)
    return {module["type"].rpartition(".")[2]: folder / module["path"] for module in modules}


def stored_poolings(modules: dict[str, Path]) -> str | list[str]:
    """The name or the names of the pooling of a model with these modules; empty if they name none."""
    settings = read_json(modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    return settings.get("pooling_mode") or [flag for flag in settings if "pooling_mode" in flag and settings[flag]]


def read_json(file: Path) -> Any:
    """The content of a JSON file; {} if it does not exist."""
    return json.loads(file.read_text()) if file.is_file() else {}


def stored_settings(folder: Path) -> tuple[Pooling, int | None]:
    """The pooling and the maximum number of tokens of the model of sentence-transformers in `folder`.

    Raises:
        UserError: its vectors are computed in another way than by an encoder and one pooling of `POOLINGS`.
    """
    modules, lengths, settings = modules_of(folder), read_json(folder / LENGTH_FILE), read_json(folder / SETTINGS_FILE)
    stored = stored_poolings(modules)
    found = [pooling for pooling, flag in POOLINGS.items() if stored in (pooling, [pooling], [flag])]
    problem = None
    if others := modules.keys() - {kind for _, kind in MODULES}:
        problem = f"has the modules {', '.join(sorted(others))}"
    elif not found:
        problem = f"has the pooling {stored}"
    elif lengths.get("do_lower_case"):
        problem = f"has do_lower_case in its {LENGTH_FILE}"
    elif (prompt := settings.get("default_prompt_name")) is not None:
        problem = f"adds the prompt {prompt} to each text"
    if problem:
        raise UserError(
            f"{folder}: this model of sentence-transformers {problem}, which predictions do not support: use the "
            "library, or a model with an encoder, the mean over tokens or the first token, and normalization"
        )
    return found[0], lengths.get("max_seq_length")


def check_modules(name: str, pooling: Pooling) -> None:
    """Check a model of sentence-transformers in the local folder `name`; print a message if its pooling is another.

    Raises:
        UserError: the model has modules that this recipe would leave out, such as a linear layer after the pooling.
    """
    if not (Path(name) / MODULES_FILE).exists():
        return
    modules = modules_of(Path(name))
    if others := modules.keys() - {kind for _, kind in MODULES}:
        raise UserError(
            f"--model_name_or_path {name}: this model of sentence-transformers has the modules {', '.join(modules)}, "
            f"and this recipe would leave out {', '.join(sorted(others))}: use a model without it"
        )
    stored = stored_poolings(modules)
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
