"""Loading pretrained tokenizers, and checking that they have a vocabulary, know the texts and can pad."""

from typing import TYPE_CHECKING, Any

from shared.errors import UserError, say
from shared.extras.hub import FLAG
from shared.pretrained.from_pretrained import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_UNKNOWN_SHARE = 0.1  # of the tokens of a data set: with more unknown tokens, a warning is printed
SPACE_MARKS = {"▁", "Ġ", "##"}
# Models that count positions from the padding id + 1 and never use the position embeddings below it.
OFFSET_POSITIONS = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def load_tokenizer(name: str, revision: str | None = None, flag: str = FLAG) -> "PreTrainedTokenizerBase":
    """The tokenizer of a pretrained model, with a padding token.

    Raises:
        UserError: it cannot be loaded, knows no words, or has no token that can serve for padding.
    """
    tokenizer = load_pretrained("AutoTokenizer", name, revision, flag)
    if not ordinary_tokens(tokenizer):
        files = ", ".join(sorted({"tokenizer.json", *type(tokenizer).vocab_files_names.values()}))
        raise UserError(
            f"{flag} {name}: its tokenizer knows no words, because its files are missing ({files}): add the files of "
            "the tokenizer that the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{flag} {name}: its tokenizer has neither a padding nor an end-of-sequence token: set "
                "tokenizer.pad_token and save the tokenizer again"
            )
        tokenizer.pad_token = tokenizer.eos_token
        say(f"{flag} {name}: its tokenizer has no padding token; {tokenizer.pad_token} is used, here and in the export")
    return tokenizer


def ordinary_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ascending ids of the tokens for text: all except special tokens, added tokens and bare space marks."""
    others = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    vocabulary = tokenizer.get_vocab()
    return sorted({i for token, i in vocabulary.items() if token not in SPACE_MARKS} - others)


def share_padding(tokenizer: "PreTrainedTokenizerBase", model: Any) -> None:
    """Set the padding token in a model's config to that of the tokenizer: decoders find the end of a text by it.

    Models that count positions from the id of their padding token keep their own.
    """
    config = model.config.get_text_config()
    if config.model_type not in OFFSET_POSITIONS:
        model.config.pad_token_id = config.pad_token_id = tokenizer.pad_token_id


def check_unknown(source: str, unknown: int, tokens: int) -> None:
    """Print a warning if many tokens of a data set are unknown; both counts exclude special tokens.

    Raises:
        UserError: all tokens are unknown.
    """
    if unknown and unknown == tokens:
        raise UserError(
            f"{source}: every word is unknown to the tokenizer, so nothing can be learned: use the tokenizer that the "
            "model was trained with, or a model for this language"
        )
    if unknown > MAX_UNKNOWN_SHARE * tokens:
        say(
            f"warning: {unknown / tokens:.0%} of the tokens of {source} are unknown to the tokenizer: check that the "
            "model was trained with it, and for this language"
        )


def unknown_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The id that is used only for unknown words; None if there is none, as in byte-level tokenizers."""
    found = tokenizer.unk_token_id
    return None if found is None or found in tokenizer("")["input_ids"] else found


def special_tokens_around(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text, such as [CLS] and [SEP].

    Raises:
        UserError: it adds special tokens in another way, or drops Latin letters.
    """
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise UserError(f"{type(tokenizer).__name__} does not put its special tokens around a text: use another model")
