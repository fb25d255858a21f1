"""What a pretrained tokenizer knows: words at all, the words of the texts, and a token to pad with."""

from typing import TYPE_CHECKING, Any

from shared.errors import UserError, say
from shared.pretrained.from_pretrained import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--model_name_or_path"
MOST_UNKNOWN = 0.1  # share of the tokens of a data set, beyond which a warning is due
MARKS_OF_SPACE = {"▁", "Ġ", "##"}
# Models that count positions from the padding id + 1, so that as many of their position embeddings are never used.
OFFSET_POSITIONS = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def load_tokenizer(name: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a pretrained model, with a token to pad with.

    Raises:
        UserError: there is none, it knows no words, or it has no token that could pad.
    """
    tokenizer = load_pretrained("AutoTokenizer", name, revision)
    if not ordinary_tokens(tokenizer):
        files = ", ".join(sorted({"tokenizer.json", *type(tokenizer).vocab_files_names.values()}))
        raise UserError(
            f"{FLAG} {name}: its tokenizer knows no words, as transformers makes one up where the files are missing "
            f"({files}): add the files of the tokenizer that the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        pad_with_another(tokenizer, name, revision)
    return tokenizer


def ordinary_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids of the tokens that stand for text, ascending: neither special nor added nor a mere mark of space."""
    others = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    vocabulary = tokenizer.get_vocab()
    return sorted({i for token, i in vocabulary.items() if token not in MARKS_OF_SPACE} - others)


def pad_with_another(tokenizer: "PreTrainedTokenizerBase", name: str, revision: str | None) -> None:
    """Give a tokenizer without a padding token the one that the model was trained with, or the end-of-sequence token.

    Raises:
        UserError: there is neither.
    """
    config = load_pretrained("AutoConfig", name, revision).get_text_config()
    of_model = getattr(config, "pad_token_id", None)
    token = None
    if of_model is not None and 0 <= of_model < len(tokenizer):
        token = str(tokenizer.convert_ids_to_tokens(of_model))
        if of_model not in tokenizer.all_special_ids and "pad" not in token.lower():
            token = None  # an ordinary word: what the config says is a default of its class
    token = token or tokenizer.eos_token
    if token is None:
        raise UserError(
            f"{FLAG} {name}: its tokenizer has neither a padding nor an end-of-sequence token: set "
            "tokenizer.pad_token and save it again"
        )
    tokenizer.pad_token = token
    say(f"{FLAG} {name}: its tokenizer has no padding token; {token} pads, here and in the exported model")


def share_padding(tokenizer: "PreTrainedTokenizerBase", model: Any) -> None:
    """Have the config of a model name the token that the tokenizer pads with: by it, decoders find the end of a text.

    Models that count positions from the id of their padding token keep theirs.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        say(f"{FLAG}: the model's config has no padding token; {tokenizer.pad_token} pads, as in its tokenizer")
    if config.model_type not in OFFSET_POSITIONS:
        model.config.pad_token_id = config.pad_token_id = tokenizer.pad_token_id


def check_unknown(source: str, unknown: int, tokens: int) -> None:
    """Say that many of the tokens of a data set, special ones aside, are unknown to the tokenizer.

    Raises:
        UserError: all of them are.
    """
    if unknown and unknown == tokens:
        raise UserError(
            f"{source}: every word is unknown to the tokenizer, so nothing can be learned: take the tokenizer that the "
            "model was trained with, or a model for this language"
        )
    if unknown > MOST_UNKNOWN * tokens:
        say(
            f"warning: {unknown / tokens:.0%} of the tokens of {source} are unknown to the tokenizer: is it the one "
            "that the model was trained with, and made for this language?"
        )


def unknown_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The id that stands for unknown words only; None where there is none, as in byte-level tokenizers."""
    found = tokenizer.unk_token_id
    return None if found is None or found in tokenizer("")["input_ids"] else found
