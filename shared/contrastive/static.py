"""Static models (`--static`): one vector for each token, and no layers.

The embedding of a text is the mean of the vectors of its tokens, without special tokens. It is the model
StaticEmbedding of sentence-transformers, which loads the exported folder.
"""

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shared.contrastive.pooling import Pooling
from shared.errors import UserError, about

STATIC = "StaticEmbedding"

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            """The vectors of the tokens, [texts, length, width]; shared/contrastive/pooling.py computes the mean."""
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

    if not tokenizer.is_fast:
        raise UserError(f"--static: a {type(tokenizer).__name__} has no tokenizer.json, which a static model needs")
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        truncation_side=tokenizer.truncation_side,
        **tokenizer.special_tokens_map,
    )
