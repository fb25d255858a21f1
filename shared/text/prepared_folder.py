"""A prepared corpus as a folder that can be copied anywhere: its tokens, its index and its tokenizer.

    index.json                     the list of shards, and the size and digest of every other file
    training/tokens-00000, ...     the shards: tokens of consecutive documents
    training/offsets               where each document begins
    validation/...                 the same for a separate validation corpus
    blocks                         the digest of each block of the shards, in their order
    tokenizer/                     the tokenizer of a new model

`python -m shared.prepare --to FOLDER` writes it. If it lies behind a URL, the first start copies all files except the
shards to this machine.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from shared.cache.prepared import build_once, cache_dir
from shared.disk import is_url, sync
from shared.errors import UserError
from shared.text.object_store import PATIENCE_AT_START, RemoteFolder
from shared.text.remote_tokens import RemoteBlocks, RemoteTokens, block_digest, hashes, reserve
from shared.text.token_files import Ints, TokenFile, Tokens, mapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--prepared_data"
FORMAT = 1  # of the folder; a reader knows one
BLOCK_BYTES = 1 << 16  # of new folders: about as long as the answer to a request takes anyway
REQUEST_BYTES = 1 << 23  # of an index file that is copied from a URL
DEFAULT_CACHE_GB = 16.0
INDEX, BLOCKS, TOKENIZER = "index.json", "blocks", "tokenizer"


@dataclass(frozen=True)
class PreparedCorpus:
    """One corpus of a prepared folder, with the attributes of a `TokenFile`."""

    offsets_file: Path  # on this machine
    tokens: Tokens
    digest: str  # equal to that of the `TokenFile` it was made from

    @property
    def offsets(self) -> Ints:
        """int64 [documents + 1], memory-mapped: where each document begins in `tokens`, and the end of `tokens`."""
        return mapped(self.offsets_file, np.int64)


@dataclass(frozen=True)
class PreparedFolder:
    """An opened folder."""

    corpora: dict[str, PreparedCorpus]  # training, and validation if it was prepared from files of its own
    vocabulary: str  # the digest of the tokenizer's vocabulary
    trained: tuple[str, int] | None  # type and size of the vocabulary, if the tokenizer was trained for a new model
    tokenizer: Path  # its folder, on this machine


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of the tokens and their ids: token files are valid for any tokenizer with the same ones."""
    return hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16).hexdigest()


# Writing


def write_prepared(
    folder: Path,
    corpora: Mapping[str, TokenFile],
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
        with FileLock(folder / ".lock").acquire(blocking=False):
            _write(folder, corpora, tokenizer, trained)
        (folder / ".lock").unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"--to {folder}: another process writes to it: wait, or give another folder") from None
    except OSError as error:
        raise UserError(
            f"--to {folder} cannot be written ({error.strerror or error}): free space, or give another folder"
        ) from None


def _write(
    folder: Path,
    corpora: Mapping[str, TokenFile],
    tokenizer: "PreTrainedTokenizerBase",
    trained: tuple[str, int] | None,
) -> None:
    vocabulary = vocabulary_digest(tokenizer)
    if (folder / INDEX).exists():
        before = _parsed((folder / INDEX).read_bytes(), f"--to {folder}")
        known = {name: corpus["digest"] for name, corpus in before["corpora"].items()}
        if before["vocabulary"] != vocabulary or known != {name: file.digest for name, file in corpora.items()}:
            raise UserError(f"--to {folder} holds other prepared data: give another folder, or remove it")
        (folder / INDEX).unlink()
    tokenizer.save_pretrained(folder / TOKENIZER)
    listed, digests = {}, []
    for name, file in corpora.items():
        (folder / name).mkdir(exist_ok=True)
        _copy(file.folder / "offsets", folder / name / "offsets")
        tokens, shards = file.tokens, []
        for number, shard in enumerate(tokens.files):
            target = f"{name}/tokens-{number:05}"
            digests.append(_copy(shard, folder / target))
            shards.append((target, tokens.ends[number + 1] - tokens.ends[number]))
        listed[name] = {"digest": file.digest, "dtype": tokens.dtype.name, "shards": shards}
    np.concatenate(digests).tofile(folder / BLOCKS)
    small = [folder / BLOCKS, *(folder / name / "offsets" for name in corpora), *(folder / TOKENIZER).iterdir()]
    index = {
        "format": FORMAT,
        "vocabulary": vocabulary,
        "trained": trained,
        "block_bytes": BLOCK_BYTES,
        "corpora": listed,
        "files": {str(path.relative_to(folder)): [path.stat().st_size, _digest(path)] for path in sorted(small)},
    }
    partial_index = folder / f"{INDEX}.partial"
    partial_index.write_text(json.dumps(index | {"digest": _digest_of_index(index)}))
    for path in (*small, partial_index):
        sync(path)
    partial_index.rename(folder / INDEX)
    sync(folder)


def _copy(source: Path, target: Path) -> NDArray[np.uint64]:
    """Copy a file, unless the target has the same content; return the digests of its blocks."""
    digests = _block_digests(source)
    if not target.exists() or not np.array_equal(_block_digests(target), digests):
        half = target.with_name(f"{target.name}.partial")
        shutil.copyfile(source, half)
        sync(half)
        half.rename(target)
    return digests


def _block_digests(file: Path) -> NDArray[np.uint64]:
    with file.open("rb") as stream:
        return np.array([block_digest(block) for block in iter(partial(stream.read, BLOCK_BYTES), b"")], np.uint64)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, hashes().xxh3_128).hexdigest()


def _digest_of_index(index: Mapping[str, Any]) -> str:
    """A digest of the index, and thereby of the whole folder."""
    return hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()


# Reading


def open_prepared(where: str, cache_gb: float | None, samples: int, max_length: int) -> PreparedFolder:
    """Open a prepared folder on this machine or behind a URL.

    Args:
        where: --prepared_data.
        cache_gb: --cache_gb.
        samples, max_length: samples of a step and tokens of a sample, for which the cache must have room.

    Raises:
        UserError: a file is missing, damaged or cannot be read, or --cache_gb has no effect or is too small.
    """
    if not is_url(where):
        if cache_gb is not None:
            raise UserError(f"--cache_gb {cache_gb:g} has no effect on {FLAG} {where}, a folder here: remove it")
        return _opened_here(Path(where))
    remote = RemoteFolder(where, FLAG)
    index = _parsed(remote.read(INDEX, patience=PATIENCE_AT_START), f"{FLAG} {where}")
    here = build_once(f"prepared-{index['digest']}", partial(_copy_small_files, remote, index["files"]))
    shards = [
        (path, count * _width(corpus)) for corpus in index["corpora"].values() for path, count in corpus["shards"]
    ]
    blocks = sum(-(-size // index["block_bytes"]) for _, size in shards)
    width = max(_width(corpus) for corpus in index["corpora"].values())
    of_step = min(blocks, samples * most_blocks(max_length * width, index["block_bytes"]))
    size = min(blocks, int((DEFAULT_CACHE_GB if cache_gb is None else cache_gb) * 1e9) // index["block_bytes"])
    if size < of_step:
        least = _rounded_up(of_step * index["block_bytes"] / 1e9)
        given = f"--cache_gb {DEFAULT_CACHE_GB if cache_gb is None else cache_gb:g}"
        raise UserError(f"{given} is too small for the blocks of one step: give {least:g} or more")
    cache = cache_dir() / f"blocks-{index['digest']}"
    reserve(cache, size * index["block_bytes"], "--cache_gb")
    everything = RemoteBlocks(remote, shards, index["block_bytes"], here / BLOCKS, cache)
    corpora, first = {}, 0
    for name, corpus in index["corpora"].items():
        tokens = RemoteTokens(everything, first, [count for _, count in corpus["shards"]], corpus["dtype"])
        corpora[name] = PreparedCorpus(here / name / "offsets", tokens, corpus["digest"])
        first += len(corpus["shards"])
    return PreparedFolder(corpora, index["vocabulary"], _trained(index), here / TOKENIZER)


def most_blocks(size: int, block_bytes: int) -> int:
    """The number of blocks that a span of `size` bytes may touch."""
    return 1 + -(-(size - 1) // block_bytes)


def _rounded_up(number: float) -> float:
    """A number with two digits, not smaller."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _width(corpus: Mapping[str, Any]) -> int:
    return int(np.dtype(corpus["dtype"]).itemsize)


def _trained(index: Mapping[str, Any]) -> tuple[str, int] | None:
    return None if index["trained"] is None else (index["trained"][0], index["trained"][1])


def _parsed(content: bytes, source: str) -> dict[str, Any]:
    """The index, compared with its own digest.

    Raises:
        UserError: it is damaged or of another format.
    """
    try:
        index: dict[str, Any] = json.loads(content)
        number, expected = index["format"], index.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{source}/{INDEX} is no index of prepared data: copy the prepared folder again") from None
    if number != FORMAT:
        raise UserError(
            f"{source}/{INDEX} has format {number}, and this version reads {FORMAT}: prepare the data again"
        )
    if _digest_of_index(index) != expected:
        raise UserError(f"{source}/{INDEX} is damaged: copy the prepared folder again")
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
        if _digest(here / name) != expected:
            raise UserError(f"{FLAG} {remote.url}/{name} differs from its index: copy the prepared folder there again")


def _opened_here(folder: Path) -> PreparedFolder:
    """A folder on this machine: the digests of its small files, and of both ends of each shard, are compared."""
    source = f"{FLAG} {folder}"
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{source} has no {INDEX}: give the folder that python -m shared.prepare --to {folder} RECIPE FLAGS writes"
        )
    index = _parsed((folder / INDEX).read_bytes(), source)
    for name, problem in _problems(folder, index):
        raise UserError(f"{source}/{name} {problem}: prepare the data again, or copy the folder again")
    corpora = {}
    for name, corpus in index["corpora"].items():
        files, counts = [folder / path for path, _ in corpus["shards"]], [count for _, count in corpus["shards"]]
        tokens = Tokens(files, counts, corpus["dtype"])
        corpora[name] = PreparedCorpus(folder / name / "offsets", tokens, corpus["digest"])
    return PreparedFolder(corpora, index["vocabulary"], _trained(index), folder / TOKENIZER)


def _problems(folder: Path, index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (file, what is wrong with it)."""
    for name, (size, expected) in index["files"].items():
        if not (folder / name).is_file():
            yield name, "is missing"
        elif (folder / name).stat().st_size != size or _digest(folder / name) != expected:
            yield name, "differs from the index"
    digests, first, length = mapped(folder / BLOCKS, np.uint64), 0, index["block_bytes"]
    for corpus in index["corpora"].values():
        for name, count in corpus["shards"]:
            size = count * _width(corpus)
            blocks = -(-size // length)
            if not (folder / name).is_file():
                yield name, "is missing"
            elif (folder / name).stat().st_size != size:
                yield name, "is longer or shorter than the index says"
            elif blocks:
                with (folder / name).open("rb") as file:
                    ends = []
                    for block in (0, blocks - 1):
                        file.seek(block * length)
                        ends.append(block_digest(file.read(length)))
                if ends != [digests[first], digests[first + blocks - 1]]:
                    yield name, "differs from the index"
            first += blocks
