"""The training and the validation corpus of a run as tokens: from its files, or prepared ahead."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shared.cache.prepared import each_share
from shared.datasets.rows import source_of
from shared.datasets.tables import hold_out, limited
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.pretrained.tokenizers import load_tokenizer
from shared.text.documents import first_texts, load_documents
from shared.text.prepared_folder import FLAG, open_prepared, vocabulary_digest
from shared.text.token_files import Corpus, tokenize_documents
from shared.text.tokenized import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_BYTES = 1 << 26  # a new tokenizer is trained on this much text from the start of the data

Part = tuple[Corpus, pa.Table]  # a corpus and those of its `documents` that are used


def load_corpus(config: Any) -> tuple[Part, Part, "PreTrainedTokenizerBase"]:
    """The training part, the validation part and the tokenizer; the documents are tokenized if they are not prepared.

    Args:
        config: the settings of recipes/mlm.py.

    Raises:
        UserError: the data do not exist or cannot be read, or a flag has no effect on them.
        Unfinished: see `Division.build`.
    """
    if config.prepared_data:
        corpora, tokenizer = load_prepared(config)
        return *select_parts(corpora, f"{FLAG} {config.prepared_data}", config), tokenizer
    parts = load_documents(config, config.text_column_name)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
    else:
        sample = first_texts(parts[0], TOKENIZER_BYTES)
        tokenizer = train_tokenizer(sample, ("text",), config.tokenizer_type, config.vocab_size, config.max_length)
    corpora = each_share(lambda each: tokenize_documents(each, tokenizer), parts)
    return *select_parts(corpora, source_of(parts[0]), config), tokenizer


def load_prepared(config: Any) -> tuple[list[Corpus], "PreTrainedTokenizerBase"]:
    """The corpora in the folder or URL --prepared_data, and the tokenizer, which it has for a new model.

    Raises:
        UserError: the data were prepared with another tokenizer, or see `open_prepared`.
    """
    from transformers import PreTrainedTokenizerFast

    where = f"{FLAG} {config.prepared_data}"
    if config.text_column_name != "text":
        raise UserError(
            f"--text_column_name {config.text_column_name} has no effect on {where}, which has tokens: remove the flag"
        )
    prepared = open_prepared(config.prepared_data, config.cache_gb)
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
    return prepared.corpora, tokenizer


def select_parts(corpora: list[Corpus], source: str, config: DataOptions) -> tuple[Part, Part]:
    """(corpus, selected documents) for training and for validation.

    Without a second corpus, --validation_split_percentage of the documents are held out: see `hold_out`.
    --max_train_samples and --max_eval_samples limit the number of documents.

    Args:
        corpora: to train on, and, if there is one, to validate on.
        source: the name of the first one in messages.
        config: the settings.

    Raises:
        UserError: there is only one document, so none can be held out.
    """
    tables = [corpus.documents(source) for corpus in corpora]
    if len(tables) == 1:
        tables = [*hold_out(tables[0], config.validation_split_percentage, config.seed)]
    train, validation = limited((tables[0], tables[1]), config)
    return (corpora[0], train), (corpora[-1], validation)
