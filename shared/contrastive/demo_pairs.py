"""The embedded pairs of texts: a function's docstring, and its source without the docstring. They need no network.

The functions are those of installed libraries; `load` returns them. `python -m shared.contrastive.demo_pairs` prints
the sizes and the retrieval scores of TF-IDF.
"""

import ast
import hashlib
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.cache.prepared import build_once
from shared.datasets import demo_texts

if TYPE_CHECKING:  # the processes that parse files import this module and do not need pyarrow
    import pyarrow as pa

FORMAT = 1  # part of the cache's name: increase it when a change below changes the data
COPIES = "transformers"  # is left out: its files repeat each other's functions
PAIRS_PER_LIBRARY = 2000
MIN_CHARACTERS = 80  # of both texts of a pair


def load(progress: bool = True) -> "tuple[pa.Table, pa.Table]":
    """Training and validation tables with the string columns anchor (docstring), positive (source) and file.

    The rows are in a fixed random order. All functions of a source file are in the same table, and no text occurs
    twice. The first call on a machine reads the sources, which takes some seconds; with `progress`, that process
    reports it on stderr.

    Raises:
        UserError: too few of the libraries are installed.
    """
    import pyarrow.parquet as pq

    roots, versions, _ = demo_texts.required()
    roots.pop(COPIES, None)

    def build(folder: Path) -> None:
        if progress:
            names = ", ".join(f"{package} {versions[package]}" for package in roots)
            print(f"reading functions, once per machine, from {names}", file=sys.stderr, flush=True)
        table = gather(roots, progress)
        for split in ("train", "validation"):
            side = [value == split for value in table["split"].to_pylist()]
            pq.write_table(table.filter(side).drop_columns(["split"]), folder / f"{split}.parquet")

    content = json.dumps([FORMAT, sys.version_info[:2], {package: versions[package] for package in roots}])
    folder = build_once(f"functions-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}", build)
    train, validation = (pq.ParquetFile(folder / f"{part}.parquet").read() for part in ("train", "validation"))
    return train, validation


def gather(roots: Mapping[str, Path], progress: bool = False) -> "pa.Table":
    """The functions in each library's source folder: columns anchor, positive, file and split.

    Of the pairs that share a docstring or a source, up to white space, one is kept.
    """
    import pyarrow as pa
    from tqdm import tqdm

    files = {name: path for label, root in roots.items() for name, path in demo_texts.sample_files(label, root)}
    found = []
    with tqdm(total=len(files), desc="reading sources", unit="file", disable=not progress) as bar:
        found_in_files = demo_texts.parse_in_processes(list(files.values()), "shared.contrastive.demo_pairs")
        for file, pairs in zip(files, found_in_files, strict=True):
            found += [(demo_texts.uniform_hash("order", anchor), file, anchor, source) for anchor, source in pairs]
            bar.update()

    rows = []
    seen: set[str] = set()
    per_library: Counter[str] = Counter()
    for _, file, *pair in sorted(found):
        keys = [" ".join(text.split()) for text in pair]
        library = file.partition("/")[0]
        if min(map(len, keys)) < MIN_CHARACTERS or not seen.isdisjoint(keys):
            continue
        if per_library[library] < PAIRS_PER_LIBRARY:
            per_library[library] += 1
            seen.update(keys)
            rows.append((*pair, file, "validation" if demo_texts.in_validation(file) else "train"))
    columns = zip(*rows, strict=True)
    return pa.table(dict(zip(("anchor", "positive", "file", "split"), map(list, columns), strict=True)))


def functions(source: bytes) -> list[tuple[str, str]]:
    """(docstring, source without it) of the functions and methods in a Python file; [] if it cannot be parsed.

    Functions inside other functions are left out, because their docstring is part of the source of the outer one.
    """
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # code for a newer Python, or null bytes (a ValueError up to Python 3.11)
        return []
    lines = [line.decode(errors="ignore") for line in re.split(rb"\r\n|\r|\n", source)]
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text, first = ast.get_docstring(node), node.body[0]
            if text and len(node.body) > 1 and first.lineno > node.lineno:
                code = [*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno : node.end_lineno]]
                text = text.encode(errors="ignore").decode()  # drops lone surrogates, which UTF-8 cannot encode
                found.append((text, textwrap.dedent("\n".join(code))))
            continue
        for block in ("body", "orelse", "handlers", "finalbody"):  # unlike ast.walk, skips the many expressions
            pending.extend(getattr(node, block, ()))
    return found


def _parse_files() -> None:
    """Read file names from stdin and write their functions to stdout, in a process of `parse_in_processes`."""
    json.dump([functions(Path(path).read_bytes()) for path in json.load(sys.stdin)], sys.stdout)


def _report() -> None:
    """Print the figures of docs/embeddings.md about the data: sizes, and the scores of TF-IDF on validation pairs."""
    import numpy as np
    import torch
    from sklearn.feature_extraction.text import TfidfVectorizer

    from shared.contrastive.retrieval import NAMES, figures

    train, validation = ({name: t[name].to_pylist() for name in ("anchor", "positive", "file")} for t in load())
    for label, table in (("training", train), ("validation", validation)):
        sizes = Counter(file.partition("/")[0] for file in table["file"])
        print(f"{len(table['file']):,} {label} pairs:", ", ".join(f"{name} {n:,}" for name, n in sorted(sizes.items())))
    # In lower case, and a name such as snake_case is several words: the usual pattern would take it as one.
    tfidf = TfidfVectorizer(sublinear_tf=True, token_pattern=r"[a-z]+|\d+")
    tfidf.fit(train["anchor"] + train["positive"])
    anchors, positives = (tfidf.transform(validation[name]) for name in ("anchor", "positive"))
    similarity = torch.from_numpy((anchors @ positives.T).toarray())
    pairs = np.arange(len(similarity))[:, None].repeat(2, axis=1)
    scores = figures(similarity, pairs, temperature=0.05).mean(0).tolist()
    print("TF-IDF:", ", ".join(f"{name} {value:.3f}" for name, value in zip(NAMES, scores[1:], strict=True)))


if __name__ == "__main__":
    _report()
