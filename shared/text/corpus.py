"""The training and the validation corpus of a run as tokens: from its files, or prepared ahead."""

from typing import TYPE_CHECKING, Any

from shared.cache.prepared import each_share
from shared.errors import UserError, say
from shared.options.data_options import DataOptions
from shared.pretrained.tokenizers import load_tokenizer
from shared.text.documents import Documents, first_texts, load_documents
from shared.text.pieces import Selection
from shared.text.prepared_folder import FLAG, open_prepared, vocabulary_digest
from shared.text.token_files import Corpus, tokenize_documents
from shared.text.tokenized import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_BYTES = 1 << 26  # a new tokenizer is trained on this much text from the start of the data

Part = tuple[Corpus, Selection]  # a corpus and the documents of it that are used


def load_corpus(config: Any) -> tuple[Part, Part, "PreTrainedTokenizerBase"]:
    """The training part, the validation part and the tokenizer; the documents are tokenized if they are not prepared.

    Args:
        config: the settings of recipes/mlm.py.

    Raises:
        UserError: the data do not exist or cannot be read, or a flag has no effect on them.
        Unfinished: see `Division.build`.
    """
    if config.prepared_data:
        return load_prepared(config)
    parts = load_documents(config, config.text_column_name)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        sample = first_texts(parts[0], TOKENIZER_BYTES)
        tokenizer = train_tokenizer(sample, ("text",), config.tokenizer_type, config.vocab_size, config.max_length)
    return *tokenize_parts(parts, tokenizer, config), tokenizer


def load_prepared(config: Any) -> tuple[Part, Part, "PreTrainedTokenizerBase"]:
    """As `load_corpus`, from the folder or URL --prepared_data, which has the tokenizer of a new model.

    Raises:
        UserError: the data were prepared with another tokenizer, or see `open_prepared`.
    """
    from transformers import PreTrainedTokenizerFast

    where = f"{FLAG} {config.prepared_data}"
    if config.text_column_name != "text":
        raise UserError(
            f"--text_column_name {config.text_column_name} has no effect on {where}, which has tokens: remove the flag"
        )
    prepared = open_prepared(config.prepared_data, config.cache_gb, config.global_batch_size or 1, config.max_length)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
        if vocabulary_digest(tokenizer) != prepared.vocabulary:
            raise UserError(
                f"{where} was prepared with another tokenizer than that of --model_name_or_path "
                f"{config.model_name_or_path}: prepare it again with this flag"
            )
    else:
        if prepared.trained is None:
            raise UserError(f"{where} was prepared with the tokenizer of a model: give its --model_name_or_path")
        for name, there in zip(("tokenizer_type", "vocab_size"), prepared.trained, strict=True):
            if getattr(config, name) != there:
                raise UserError(f"--{name} {getattr(config, name)}: {where} was prepared with {there}: give that")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(prepared.tokenizer, model_max_length=config.max_length)
    corpora = prepared.corpora
    return *select_parts(corpora["training"], corpora.get("validation"), where, config), tokenizer


def tokenize_parts(
    parts: tuple[Documents, Documents | None], tokenizer: "PreTrainedTokenizerBase", config: DataOptions
) -> tuple[Part, Part]:
    """The tokens of the training and the validation documents: see `select_parts`."""
    documents, validation = parts
    corpora = [documents, validation] if validation else [documents]
    file, *held = each_share(lambda each: tokenize_documents(each, tokenizer), corpora)
    return select_parts(file, held[0] if held else None, documents.source, config)


def select_parts(corpus: Corpus, validation: Corpus | None, source: str, config: DataOptions) -> tuple[Part, Part]:
    """(corpus, selected documents) for training and for validation; `source` names the training corpus in messages.

    Without a validation corpus, --validation_split_percentage of the documents are held out: see `split_documents`.
    --max_train_samples and --max_eval_samples limit the number of documents.
    """
    if validation:
        held, chosen = validation, (Selection(config.seed), Selection(config.seed))
    else:
        held = corpus
        chosen = split_documents(corpus, source, config.validation_split_percentage, config.seed)
    parts = (corpus, chosen[0], "max_train_samples"), (held, chosen[1], "max_eval_samples")
    train, validate = (
        (part, documents.limited(len(part.offsets) - 1, getattr(config, name), f"--{name}"))
        for part, documents, name in parts
    )
    return train, validate


def split_documents(corpus: Corpus, source: str, percentage: int, seed: int) -> tuple[Selection, Selection]:
    """The training and the held-out documents, a function of (seed, document, count) alone.

    Raises:
        UserError: there is only one document.
    """
    count = len(corpus.offsets) - 1
    if count < 2:
        raise UserError(f"{source} has one document: add documents, to train and to validate on")
    held = min(max(1, round(count * percentage / 100)), count - 1)
    chosen = f"{percentage} %, chosen by --seed {seed}"
    say(f"{source} has no validation data: {held:,} of its documents ({chosen}) are held out")
    return Selection(seed, held), Selection(seed, held, inside=True)
