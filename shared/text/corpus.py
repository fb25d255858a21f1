"""The corpus of a run, for language modeling: its documents, which may be larger than memory, and their tokens."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shared.cache.division import parts_by_size
from shared.cache.prepared import each_share, key_digest, place_to_begin
from shared.datasets import readers
from shared.datasets.readers import blocks, find_files, is_compressed, opened
from shared.datasets.rows import load_files, named, source_of, with_content
from shared.datasets.tables import read_parts, split
from shared.demo_data import texts as demo_texts
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.pretrained.tokenizers import load_tokenizer
from shared.text.encoder import batches_of_texts, digest_of_texts, text_column, texts_of
from shared.text.prepared_folder import FLAG as PREPARED_FLAG
from shared.text.prepared_folder import TOKENIZER, open_prepared, vocabulary_digest
from shared.text.token_files import Corpus, tokenize_documents
from shared.text.tokenized import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--text_column_name"
GROUP_BYTES = 1 << 25  # about so many of small files become one Arrow file
COMPRESSION = 4  # assumed size of the content of a compressed file, relative to the file
KINDS = (*readers.TEXT_FILES, *readers.KINDS)
TOKENIZER_BYTES = 1 << 26  # a new tokenizer is trained on this much text from the start of the data

Part = tuple[Corpus, pa.Table]  # a corpus and those of its `documents` that are used


def load_corpus(config: Any) -> tuple[Part, Part, "PreTrainedTokenizerBase"]:
    """The training part, the validation part and the tokenizer; the documents are tokenized if they are not prepared.

    Without a second corpus, documents are held out: see `tables.split`.

    Args:
        config: the settings of recipes/mlm.py.

    Raises:
        UserError: the data do not exist or cannot be read, or a flag has no effect on them.
        Unfinished: see `Division.build`.
    """
    if config.prepared_data:
        corpora, tokenizer = load_prepared(config)
        source = f"{PREPARED_FLAG} {config.prepared_data}"
    else:
        parts = load_documents(config, config.text_column_name)
        if config.model_name_or_path:
            tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
        else:
            sample, kind = first_texts(parts[0], TOKENIZER_BYTES), config.tokenizer_type
            tokenizer = train_tokenizer(sample, ("text",), kind, config.vocab_size, config.max_length)
        corpora = each_share(lambda each: tokenize_documents(each, tokenizer), parts)
        source = source_of(parts[0])
    train, validation = split([corpus.documents(source) for corpus in corpora], config)
    return (corpora[0], train), (corpora[-1], validation), tokenizer


def load_prepared(config: Any) -> tuple[list[Corpus], "PreTrainedTokenizerBase"]:
    """The corpora in the folder or URL --prepared_data, and the tokenizer, which it has for a new model.

    Raises:
        UserError: the data were prepared with another tokenizer, or see `open_prepared`.
    """
    from transformers import PreTrainedTokenizerFast

    where = f"{PREPARED_FLAG} {config.prepared_data}"
    if config.text_column_name != "text":
        raise UserError(f"--text_column_name {config.text_column_name} has no effect on {where}: remove the flag")
    corpora, index, folder = open_prepared(config.prepared_data, config.cache_gb)
    if config.model_name_or_path:
        tokenizer = load_tokenizer(config.model_name_or_path, config.revision)
        if vocabulary_digest(tokenizer) != index["vocabulary"]:
            raise UserError(
                f"{where} was prepared with another tokenizer than that of --model_name_or_path "
                f"{config.model_name_or_path}: prepare it again with this flag"
            )
    else:
        if index["trained"] is None:
            raise UserError(f"{where} was prepared with the tokenizer of a model: give its --model_name_or_path")
        for name, there in zip(("tokenizer_type", "vocab_size"), index["trained"], strict=True):
            if getattr(config, name) != there:
                raise UserError(f"--{name} {getattr(config, name)}: {where} was prepared with {there}: give that")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER, model_max_length=config.max_length)
    return corpora, tokenizer


def load_documents(config: DataOptions, text_column_name: str) -> list[pa.Table]:
    """The training documents and, if the source has some, the validation documents, from the data flags of a config.

    Raises:
        UserError: the data does not exist or cannot be read, or a flag has no effect on it.
    """

    def read(given: Sequence[str], flag: str, csv_delimiter: str | None) -> pa.Table:
        return of_files(given, flag, text_column_name, csv_delimiter)

    embedded = "the embedded docstrings", demo_texts.documents
    tables = read_parts(config, (), (), embedded=embedded, read=read)
    return tables if config.train_file else [texts_of(table, (text_column_name,), FLAG) for table in tables]


def of_files(given: Sequence[str], flag: str, column_name: str, csv_delimiter: str | None = None) -> pa.Table:
    """The texts of the files that `given` names (see `find_files`), in the order of the file names.

    A line of a text file is a document, or a row of another kind of file. Processes divide the files: each begins with
    another one, and finds those that others have read in the cache.

    Raises:
        UserError: one of them cannot be read, or lacks the column; names `flag`.
    """
    files = find_files(given, flag, KINDS, csv_delimiter)
    sizes = []
    for file in files:
        with opened(file, f"{flag} {file}"):
            sizes.append(file.stat().st_size * (COMPRESSION if is_compressed(file) else 1))

    def read(file: Path, source: str) -> Iterator[pa.Table]:
        for table in blocks(file, source, csv_delimiter, column_name):
            texts = text_column(named(table, source), column_name, FLAG)
            yield pa.table({"text": texts.cast(pa.large_string())})

    source, how = f"{flag} {' '.join(given)}", f"documents {column_name} {csv_delimiter}"
    groups = parts_by_size(sizes, GROUP_BYTES)
    begin = place_to_begin(len(groups))
    found: dict[range, pa.Table] = {}
    for group in groups[begin:] + groups[:begin]:
        found[group] = load_files(files[group.start : group.stop], flag, source, read, how)
    content = key_digest([digest_of_texts(found[group], found[group]) for group in groups])
    texts = pa.concat_tables(found[group] for group in groups).replace_schema_metadata()  # without the first group's
    return with_content(named(texts, source), content)


def first_texts(documents: pa.Table, most_bytes: int) -> pa.Table:
    """The first texts with `most_bytes` characters in total, in a column text: training data for a tokenizer."""
    texts, size = [], 0
    for text in filter(None, chain.from_iterable(batches_of_texts(documents))):
        texts.append(text)
        size += len(text)
        if size >= most_bytes:
            break
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), source_of(documents))
