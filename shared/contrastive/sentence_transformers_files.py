"""Models of the library sentence-transformers: the files with which it loads model/, and checks of those it wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.contrastive.pooling import Pooling
from shared.contrastive.static import STATIC, model_class, static_tokenizer
from shared.errors import UserError, say

# The names of sentence-transformers 2 to 5, which version 6 also accepts.
MODULES: tuple[tuple[str, str], ...] = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
MODULES_OF_STATIC: tuple[tuple[str, str], ...] = (("", STATIC), ("1_Normalize", "Normalize"))
LOADING = "`SentenceTransformer(FOLDER)` of sentence-transformers loads this folder, with pooling and normalization."
POOLINGS: dict[Pooling, str] = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
SETTINGS_FILE = "config_sentence_transformers.json"


def stored_settings(folder: Path) -> tuple[bool, str, int | None, dict[str, str]]:
    """What a model of sentence-transformers in `folder` is: whether static, pooling, maximum of tokens, prompts.

    The pooling is one of `POOLINGS`, or in other cases what the model names. The prompts have names such as query;
    empty ones are left out.

    Raises:
        UserError: its vectors are computed in another way than by an encoder, a pooling and normalization.
    """

    def read(file: Path) -> Any:
        return json.loads(file.read_text()) if file.is_file() else {}

    modules = {module["type"].rpartition(".")[2]: module["path"] for module in read(folder / MODULES_FILE)}
    lengths, settings = read(folder / LENGTH_FILE), read(folder / SETTINGS_FILE)
    prompt, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    pooling = read(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    flags = [flag for flag in pooling if "pooling_mode" in flag and pooling[flag]]
    named = pooling.get("pooling_mode") or flags
    stored = "mean" if STATIC in modules else " ".join([named] if isinstance(named, str) else named)
    problem = None
    if others := modules.keys() - {kind for _, kind in (*MODULES, *MODULES_OF_STATIC)}:
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
    used = {name: text for name, text in prompts.items() if text}
    return STATIC in modules, known.get(stored, stored), lengths.get("max_seq_length"), used


def check_modules(config: Any) -> None:
    """Check a model of sentence-transformers in the local folder --model_name_or_path.

    With --static, AutoModel of transformers loads static models afterwards.

    Prints a message if its pooling is another, or if it has prompts and the settings have none.

    Raises:
        UserError: it is static, and the settings are not; or see `stored_settings`.
    """
    name, pooling = config.model_name_or_path, config.pooling
    if config.static:
        model_class()
    if (Path(name) / MODULES_FILE).exists():
        static, stored, _, known = stored_settings(Path(name))
        if static and not config.static:
            raise UserError(f"--model_name_or_path {name} is a static model: add --static")
        if stored not in ("", pooling):
            say(f"--model_name_or_path {name} was trained with another pooling ({stored}): --pooling {pooling} is used")
        if known and config.prompts is None:
            say(f"--model_name_or_path {name} has prompts ({shown(known)}), and --prompts has none: none are used")


def shown(prompts: Mapping[str, str]) -> str:
    """Prompts with their names, in the words of a message."""
    return ", ".join(f"{name} {text!r}" for name, text in prompts.items())


class SentenceTokenizer:
    """A tokenizer whose `save_pretrained` also writes the files of sentence-transformers.

    Args:
        tokenizer: of transformers.
        config: of the recipe: how the embedding of a text is computed, the maximum numbers of tokens, the prompts.
        width: of an embedding.
    """

    def __init__(self, tokenizer: Any, config: Any, width: int) -> None:
        self.tokenizer, self.config, self.width = tokenizer, config, width

    def save_pretrained(self, folder: Path) -> None:
        """Write the files of the tokenizer, the list of modules and their settings."""
        tokenizer, modules, longest = self.tokenizer, MODULES, max(self.config.max_length)
        if self.config.static:
            tokenizer, modules = static_tokenizer(tokenizer), MODULES_OF_STATIC
            # StaticEmbedding has no setting for the length.
            tokenizer.backend_tokenizer.enable_truncation(longest, direction=tokenizer.truncation_side)
        tokenizer.save_pretrained(folder)
        pooling = {"word_embedding_dimension": self.width} | {
            flag: name == self.config.pooling for name, flag in POOLINGS.items()
        }
        prompts = zip(("query", "document"), self.config.prompts or (), strict=False)  # of anchors and positives
        files = {
            MODULES_FILE: [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ],
            **{f"{path}/config.json": pooling if kind == "Pooling" else {} for path, kind in modules if path},
            LENGTH_FILE: {"max_seq_length": longest, "do_lower_case": False},
            SETTINGS_FILE: {
                "__version__": {},
                "prompts": dict(prompts),
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
