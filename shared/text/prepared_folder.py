"""A prepared corpus as a folder that can be copied anywhere: its tokens, its offsets and its tokenizer.

    index.json                 the sizes of the files of tokens, and the size and digest of every other file
    training/tokens.npy        the tokens of all documents
    training/offsets.npy       where each document begins
    validation/...             the same for a separate validation corpus
    blocks.npy                 the digest of each block of the files of tokens, in their order
    tokenizer/                 the tokenizer of a new model

`python -m shared.prepare --to FOLDER` writes it. If it lies behind a URL, the first start copies all files except the
tokens to this machine.
"""

import filecmp
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.cache.prepared import build_once, cache_dir, read_array
from shared.checkpoints.folders import digest
from shared.disk import is_url, remedy, replace_file, sync
from shared.errors import UserError, about
from shared.processes import folder_lock
from shared.remote.object_store import PATIENCE_AT_START, RemoteFolder
from shared.text.remote_tokens import RemoteTokens, block_digest, reserve
from shared.text.token_files import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--prepared_data"
FORMAT = 2  # of the folder; a reader knows one
BLOCK_BYTES = 1 << 16  # of new folders: about as long as the answer to a request takes anyway
REQUEST_BYTES = 1 << 23  # of an index file that is copied from a URL
DEFAULT_CACHE_GB = 16.0
INDEX, BLOCKS, TOKENIZER = "index.json", "blocks.npy", "tokenizer"
OFFSETS, TOKENS = "offsets.npy", "tokens.npy"  # of each corpus


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of the tokens and their ids: tokens are valid for any tokenizer with the same ones."""
    return hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16).hexdigest()


# Writing


def write_prepared(
    folder: Path,
    corpora: Mapping[str, Corpus],
    tokenizer: "PreTrainedTokenizerBase",
    trained: tuple[str, int] | None,
) -> None:
    """Copy corpora and their tokenizer into a folder. It is complete once it has index.json, which is written last.

    Files that are already there are compared and kept, so an interrupted copy resumes.

    Raises:
        UserError: the folder holds other data, another process writes it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_lock.acquire(folder, "--to")
        vocabulary = vocabulary_digest(tokenizer)
        if (folder / INDEX).exists():
            before = _parsed((folder / INDEX).read_bytes(), f"--to {folder}")
            known = {name: corpus["digest"] for name, corpus in before["corpora"].items()}
            if before["vocabulary"] != vocabulary or known != {name: corpus.digest for name, corpus in corpora.items()}:
                raise UserError(f"--to {folder} holds other prepared data: give another folder, or remove it")
            (folder / INDEX).unlink()
        tokenizer.save_pretrained(folder / TOKENIZER)
        listed, digests = {}, []
        for name, corpus in corpora.items():
            (folder / name).mkdir(exist_ok=True)
            for file in (OFFSETS, TOKENS):
                _copy(corpus.folder / file, folder / name / file)
            with (folder / name / TOKENS).open("rb") as stream:
                blocks = iter(partial(stream.read, BLOCK_BYTES), b"")
                digests.append(np.fromiter(map(block_digest, blocks), np.uint64))
            tokens, size = corpus.tokens, (folder / name / TOKENS).stat().st_size
            counts = {"tokens": len(tokens), "bytes": size, "begin": size - len(tokens) * tokens.dtype.itemsize}
            listed[name] = {"digest": corpus.digest, "dtype": tokens.dtype.name} | counts
        np.save(folder / BLOCKS, np.concatenate(digests))
        small = [folder / BLOCKS, *(folder / name / OFFSETS for name in corpora), *(folder / TOKENIZER).iterdir()]
        index = {
            "format": FORMAT,
            "vocabulary": vocabulary,
            "trained": trained,  # type and size of the vocabulary, if the tokenizer was trained for a new model
            "block_bytes": BLOCK_BYTES,
            "corpora": listed,
            "files": {str(path.relative_to(folder)): [path.stat().st_size, digest(path)] for path in sorted(small)},
        }
        for path in small:
            sync(path)
        replace_file(folder / INDEX, json.dumps(index | {"digest": _digest_of_index(index)}))
        sync(folder)
    except OSError as error:
        raise UserError(f"--to {folder} cannot be written ({error.strerror or error}): {remedy(error)}") from None
    finally:
        folder_lock.release_all()


def _copy(source: Path, target: Path) -> None:
    """Copy a file, unless the target has the same content."""
    if not target.exists() or not filecmp.cmp(source, target, shallow=False):
        half = target.with_name(f"{target.name}.partial")
        shutil.copyfile(source, half)
        sync(half)
        half.rename(target)


def _digest_of_index(index: Mapping[str, Any]) -> str:
    """A digest of the index, and thereby of the whole folder."""
    return hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()


# Reading


def open_prepared(where: str, cache_gb: float | None) -> tuple[list[Corpus], dict[str, Any], Path]:
    """Open the prepared folder --prepared_data on this machine or behind a URL, with a cache of `cache_gb` GB.

    Returns the corpora (training, and validation if it was prepared from files of its own), the index, and the folder
    of the small files on this machine.

    Raises:
        UserError: a file is missing, damaged or cannot be read, or --cache_gb has no effect, or the disk no room.
    """
    source = f"{FLAG} {where}"
    if is_url(where):
        remote = RemoteFolder(where, FLAG)
        index = _parsed(remote.read(INDEX, patience=PATIENCE_AT_START), source)
        here = build_once(f"prepared-{index['digest']}", partial(_copy_small_files, remote, index["files"]))
        tokens = _remote_tokens(remote, index, here, DEFAULT_CACHE_GB if cache_gb is None else cache_gb)
    else:
        if cache_gb is not None:
            raise UserError(f"--cache_gb {cache_gb:g} has no effect on {source}, a folder here: remove it")
        here, tokens = Path(where), {}
        with about(f"{source} (a folder, which should be one that python -m shared.prepare --to wrote)"):
            content = (here / INDEX).read_bytes()
        index = _parsed(content, source)
        for name in _damaged(here, index):
            raise UserError(f"{source}/{name} is missing or differs from the index: copy or prepare the folder again")
    corpora = [Corpus(here / name, each["digest"], tokens.get(name)) for name, each in index["corpora"].items()]
    return corpora, index, here


def _remote_tokens(
    remote: RemoteFolder, index: Mapping[str, Any], here: Path, cache_gb: float
) -> dict[str, RemoteTokens]:
    """The tokens of the corpora behind a URL, with their cache, which has room for at least one block."""
    corpora, length, first_blocks = index["corpora"], index["block_bytes"], _first_blocks(index)
    cache = cache_dir() / f"blocks-{index['digest']}"
    reserve(cache, length * max(1, min(first_blocks[-1], int(cache_gb * 1e9) // length)), "--cache_gb")
    return {
        name: RemoteTokens(remote, f"{name}/{TOKENS}", corpus, length, first, here / BLOCKS, cache)
        for (name, corpus), first in zip(corpora.items(), first_blocks, strict=False)
    }


def _first_blocks(index: Mapping[str, Any]) -> list[int]:
    """The number of the first block of the tokens of each corpus, and the number of all blocks."""
    blocks = (-(-corpus["bytes"] // index["block_bytes"]) for corpus in index["corpora"].values())
    return [*accumulate(blocks, initial=0)]


def _parsed(content: bytes, source: str) -> dict[str, Any]:
    """The index, compared with its own digest.

    Raises:
        UserError: it is damaged or of another format.
    """
    damaged = f"{source}/{INDEX} is damaged: copy the prepared folder again"
    with about(damaged):
        index: dict[str, Any] = json.loads(content)
        number, expected = index["format"], index.pop("digest")
    if number != FORMAT:
        raise UserError(f"{source}/{INDEX} has format {number}, and this version reads {FORMAT}: prepare it again")
    if _digest_of_index(index) != expected:
        raise UserError(damaged)
    return index | {"digest": expected}


def _copy_small_files(remote: RemoteFolder, files: Mapping[str, tuple[int, str]], here: Path) -> None:
    """Copy the files of the index, and compare each with its digest."""
    for name, (size, expected) in files.items():
        if not (here / name).resolve().is_relative_to(here.resolve()):
            raise UserError(f"{FLAG} {remote.url}/{INDEX} names {name}, a file outside its folder: it is not from here")
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        with (here / name).open("wb") as file:
            for start in range(0, size, REQUEST_BYTES):
                file.write(remote.read(name, range(start, min(start + REQUEST_BYTES, size))))
        if digest(here / name) != expected:
            raise UserError(f"{FLAG} {remote.url}/{name} differs from its index: copy the prepared folder there again")


def _damaged(folder: Path, index: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that are missing or differ from the index. Of the tokens, only both ends are read."""
    for name, (_, expected) in index["files"].items():
        if not (folder / name).is_file() or digest(folder / name) != expected:
            yield name
    digests, length, firsts = read_array(folder / BLOCKS), index["block_bytes"], _first_blocks(index)
    for (corpus, described), first, end in zip(index["corpora"].items(), firsts, firsts[1:], strict=False):
        file = folder / corpus / TOKENS
        if not file.is_file() or file.stat().st_size != described["bytes"]:
            yield f"{corpus}/{TOKENS}"
        with file.open("rb") as stream:
            for block in (first, end - 1):
                stream.seek((block - first) * length)
                if block_digest(stream.read(length)) != digests[block]:
                    yield f"{corpus}/{TOKENS}"
