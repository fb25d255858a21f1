"""Models of sentence embeddings: pooling, static models, and the files with which sentence-transformers loads model/.

A static model (`--static`) has one vector for each token, and no layers. The embedding of a text is the mean of the
vectors of its tokens, without special tokens. It is the model StaticEmbedding of sentence-transformers.
"""

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shared.errors import UserError, about, listed, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pooling = Literal["mean", "cls"]
STATIC = "StaticEmbedding"
# The names of sentence-transformers 2 to 5, which version 6 also accepts.
MODULES: tuple[tuple[str, str], ...] = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
MODULES_OF_STATIC: tuple[tuple[str, str], ...] = (("", STATIC), ("1_Normalize", "Normalize"))
LOADING = "`SentenceTransformer(FOLDER)` of sentence-transformers loads this folder, with pooling and normalization."
POOLINGS: dict[Pooling, str] = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
SETTINGS_FILE = "config_sentence_transformers.json"


def add_pooling(model: Any, pooling: Pooling) -> None:
    """Make an encoder of transformers (AutoModel) also return the embedding of each text, [texts, width].

    The embeddings are not normalized. They are named `logits`, because the checks of shared/speed compare the output
    of that name. The weights and the export do not change.

    Raises:
        UserError: the model has a decoder besides its encoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"--model_name_or_path: a {type(model).__name__} has an encoder and a decoder, and this recipe trains "
            "encoders: use a model such as BERT, or the encoder alone, saved with save_pretrained"
        )

    def add_embeddings(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
        output["logits"] = embeddings(output["last_hidden_state"], arguments.get("attention_mask"), pooling)
        return output

    model.register_forward_hook(add_embeddings, with_kwargs=True)


def embeddings(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """The mean of the hidden states [texts, length, width] where `mask` [texts, length] is 1, or the first of them.

    The mean is computed in float32 or float64 and returned in the dtype of the hidden states.
    """
    if pooling == "cls":
        return hidden[:, 0]
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if mask is None:
        return exact.mean(1).to(hidden.dtype)
    weights = mask[..., None].to(exact.dtype)
    return ((exact * weights).sum(1) / weights.sum(1)).to(hidden.dtype)


@cache
def model_class() -> Any:
    """The class of static models. After the first call, AutoModel of transformers loads such models, too."""
    from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

    class StaticConfig(PretrainedConfig):
        model_type = "static_embedding"
        vocab_size: int = 0
        hidden_size: int = 0
        pad_token_id: int | None = None

    class StaticModel(PreTrainedModel):
        config_class = StaticConfig

        def __init__(self, config: StaticConfig) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)  # StaticEmbedding has this name
            self.post_init()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
            """The vectors of the tokens, [texts, length, width]; `embeddings` computes their mean."""
            return BaseModelOutput(last_hidden_state=self.embedding(input_ids))

    AutoConfig.register(StaticConfig.model_type, StaticConfig)
    AutoModel.register(StaticConfig, StaticModel)
    return StaticModel


def static_model(model: Any, pooling: Pooling) -> Any:
    """A static model whose vectors are the input embeddings of `model`, or `model` itself if it is a static one.

    Raises:
        UserError: the pooling is not the mean, or the model has no table of input embeddings.
    """
    if pooling != "mean":
        raise UserError(f"--pooling {pooling}: the embedding of a text by --static is the mean: leave one of them out")
    if isinstance(model, model_class()):
        return model
    with about(f"--static: a {type(model).__name__} has no vectors of tokens"):
        vectors = model.get_input_embeddings().weight
    sizes, padding = dict(zip(("vocab_size", "hidden_size"), vectors.shape, strict=True)), model.config.pad_token_id
    made = model_class()(model_class().config_class(**sizes, pad_token_id=padding))
    made.embedding.weight.data.copy_(vectors.data)
    return made


def static_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A copy of a tokenizer that adds no special tokens to a text and returns no token types.

    Raises:
        UserError: it is not a fast tokenizer, and StaticEmbedding could not load it.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    with about("--static needs a tokenizer with a tokenizer.json"):
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        truncation_side=tokenizer.truncation_side,
        **tokenizer.special_tokens_map,
    )


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
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if text}
    pooling = read(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    named = pooling.get("pooling_mode") or [flag for flag in pooling if "pooling_mode" in flag and pooling[flag]]
    stored = "mean" if STATIC in modules else " ".join([named] if isinstance(named, str) else named)
    stored += " without prompts" * (bool(prompts) and pooling.get("include_prompt") is False)
    unlike = sorted(modules.keys() - {kind for _, kind in (*MODULES, *MODULES_OF_STATIC)})
    unlike += [name for name in ("do_lower_case", "default_prompt_name") if (lengths | settings).get(name)]
    if unlike:
        raise UserError(
            f"{folder}: this model of sentence-transformers has {listed(unlike)}, which is not supported: use the "
            "library, or a model with an encoder, the mean over tokens or the first token, and normalization"
        )
    known = {flag: name for name, flag in POOLINGS.items()}
    return STATIC in modules, known.get(stored, stored), lengths.get("max_seq_length"), prompts


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
            say(f"--model_name_or_path {name} has prompts ({with_names(known)}), and --prompts has none: none are used")


def with_names(prompts: Mapping[str, str]) -> str:
    """Prompts with their names, in the words of a message."""
    return ", ".join(f"{name} {text!r}" for name, text in prompts.items())


class SentenceTokenizer:
    """Writes the files of a tokenizer and of sentence-transformers; `width` is that of an embedding."""

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
