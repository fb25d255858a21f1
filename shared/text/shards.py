"""The shards of a corpus: files made from consecutive documents, by all processes that prepare the same data.

A corpus consists of parts, which can be read independently (see `documents.Part`). A part is cut into blocks of text,
and each block becomes a shard. The cut depends on the data alone, so any number of processes writes the same shards. A
shard is complete or absent, and its name contains a digest of its documents and of the settings. Therefore processes
on any number of machines divide the work by file locks alone, without a process group: each takes the next shard that
is missing and that no other process writes. After a kill, only the missing shards are written. Machines without a
common cache folder prepare a copy each.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from shared.cache.prepared import (
    Unfinished,
    build_if_free,
    cache_dir,
    can_be_built,
    is_complete,
    share_of_task,
    until_complete,
)
from shared.datasets.documents import Batches, Part
from shared.errors import say

BLOCK_CHARACTERS = 1 << 25  # of a block, or a few more; changing it prepares all data again
FACTS = "facts.json"

Write = Callable[[Path, Batches, Callable[[int], object]], dict[str, Any]]


def complete_shards(name: str) -> list[Path] | None:
    """The folders of the shards of the part `name`, in order; None if one is missing or damaged."""
    found: list[Path] = []
    while True:
        folder = cache_dir() / shard_name(name, len(found))
        if not is_complete(folder):
            return None
        found.append(folder)
        if facts_of(folder)["last"]:
            return found


def shard_name(part: str, number: int) -> str:
    """The name of a shard's folder."""
    return f"shard-{part}-{number:04}"


def facts_of(shard: Path) -> dict[str, Any]:
    """What `write` returned for a shard, and `last`: whether it is the last one of its part."""
    facts: dict[str, Any] = json.loads((shard / FACTS).read_text())
    return facts


def in_blocks(batches: Batches) -> Iterator[tuple[Batches, Callable[[], bool]]]:
    """Cut documents into blocks, and yield (batches of a block, is_last).

    A block ends with the document that brings it to BLOCK_CHARACTERS, so the cut does not depend on the batches. A
    block must be read, or is skipped, before the next one; nothing is read before its batches are requested.
    `is_last()` is known once the block has been read. Without documents there is one empty block.
    """
    batches = filter(None, batches)
    ahead: deque[list[str | None]] = deque()  # documents after the block that have been read: at most one batch

    def block() -> Batches:
        room = BLOCK_CHARACTERS
        while room > 0 and (batch := ahead.popleft() if ahead else next(batches, None)):
            ends = np.cumsum([len(text or "") for text in batch])
            count = int(np.searchsorted(ends, room)) + 1  # documents until the block is full
            room -= int(ends[-1])
            if count < len(batch):
                ahead.append(batch[count:])
            yield batch[:count]
        if not ahead:
            ahead.extend(islice(batches, 1))

    while True:
        documents = block()
        yield documents, lambda: not ahead
        deque(documents, 0)  # skips what was not read
        if not ahead:
            return


def build_shards(parts: Sequence[Part], settings: bytes, write: Write, source: str) -> list[list[Path]]:
    """The folders of the shards of each part; those that are missing are written, together with other processes.

    Args:
        parts: of the corpus.
        settings: everything except the documents on which a shard depends.
        write: called as `write(folder, batches, count)`, fills the folder of a shard and returns facts about it for
            `facts_of`; it reads all batches and calls `count(n)` after each n documents.
        source: the name of the corpus in messages.

    Raises:
        UserError: a part cannot be read, or the cache cannot be written.
        Unfinished: only the parts of one task were to be written (`only_task`), and others are missing.
    """
    key = hashlib.blake2b(settings + repr(BLOCK_CHARACTERS).encode()).digest()
    names = [hashlib.blake2b(key + part.content.encode(), digest_size=16).hexdigest() for part in parts]
    jobs = [*dict(zip(names, parts, strict=True)).items()]  # once for parts with the same content
    found: dict[str, list[Path]] = {}
    lengths: dict[str, int] = {}  # of parts whose end this process has seen, in shards

    def missing(jobs: list[tuple[str, Part]]) -> list[tuple[str, Part]]:
        found.update({name: shards for name, _ in jobs if (shards := complete_shards(name))})
        return [(name, part) for name, part in jobs if name not in found]

    if pending := missing(share_of_task(jobs)):
        if found:
            say(f"{source}: {len(found):,} of {len(found) + len(pending):,} parts are already tokenized")
        first_shards = {shard_name(name, 0) for name, _ in jobs}
        # One process prints the progress. If only one part is missing, that is the process that writes it.
        silent = {"disable": True} if int(os.environ.get("RANK", 0)) and len(pending) > 1 else {}
        with tqdm(desc=f"tokenizing {source}", unit=" documents", mininterval=0.5, **silent) as bar:

            def write_parts(pending: list[tuple[str, Part]], helping: bool) -> int:
                written = 0
                for name, part in pending:
                    if more := _write_part(name, part, write, helping, bar, lengths):
                        written += more
                        begun = len(first_shards.intersection(os.listdir(cache_dir())))  # noqa: PTH208  names suffice
                        bar.set_postfix_str(f"{begun:,} of {len(jobs):,} parts")
                return written

            until_complete(pending, missing, write_parts)
    if others := missing([(name, part) for name, part in jobs if name not in found]):
        raise Unfinished(f"{len(others):,} of {len(jobs):,} parts are left to other tasks")
    return [found[name] for name in names]


def _write_part(name: str, part: Part, write: Write, helping: bool, bar: tqdm, lengths: dict[str, int]) -> int:
    """Write the missing shards of a part, except those that other processes write; return how many were written.

    If another process writes one of them, the rest of the part is left to it, except if this process is `helping` with
    a long part. A part whose length is in `lengths`, in shards, is not read if nothing can be written.
    """
    if name in lengths and not any(can_be_built(shard_name(name, number)) for number in range(lengths[name])):
        return 0
    written = 0
    for number, (batches, is_last) in enumerate(in_blocks(part.batches())):

        def build(folder: Path, batches: Batches = batches, is_last: Callable[[], bool] = is_last) -> None:
            nonlocal written
            facts = write(folder, batches, bar.update)
            (folder / FACTS).write_text(json.dumps(facts | {"last": is_last()}))
            written += 1

        shard = shard_name(name, number)
        if build_if_free(shard, build):
            if facts_of(cache_dir() / shard)["last"]:
                lengths[name] = number + 1
                break
        elif not (helping and part.long):
            break
    else:
        lengths[name] = number + 1
    return written
