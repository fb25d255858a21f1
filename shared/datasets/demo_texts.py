"""The embedded text data: docstrings of installed libraries, labeled by library. They need no network.

`load` returns classification data (train, validation); `documents` returns all texts, for masked language modeling.
`python -m shared.datasets.demo_texts` prints the sizes and the accuracy of simple baselines.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cache.prepared import build_once
from shared.errors import UserError

if TYPE_CHECKING:  # the processes that parse files import this module and do not need pyarrow
    import pyarrow as pa

FORMAT = 1  # part of the cache's name: increase it when a change below changes the data
LIBRARIES = {  # package: distribution. The first MAX_LIBRARIES that are installed are read; requirements.txt has all
    "transformers": "transformers",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "sympy": "sympy",
    "networkx": "networkx",
    "torch": "torch",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
}
MAX_LIBRARIES, MIN_LIBRARIES = 5, 4
FILES_PER_LIBRARY = 600
TEXTS_PER_LIBRARY = 2000
MIN_CHARACTERS = 80  # shorter texts are mostly single sentences that fit any library ("Return a copy.")
VALIDATION_SHARE = 0.15
FILES_PER_PROCESS = 200


def load(progress: bool = True) -> "tuple[pa.Table, pa.Table]":
    """Training and validation tables with the string columns text, label (the library) and file.

    The rows are in a fixed random order, with at most TEXTS_PER_LIBRARY texts per label. All texts of a source file are
    in the same table. The tables are the same in every process for the same library versions. The first call on a
    machine reads the sources, which takes some seconds; with `progress`, that process reports it on stderr.

    Raises:
        UserError: too few of the libraries are installed.
    """
    import pyarrow.parquet as pq

    folder = _cache_folder(progress)
    train, validation = (pq.ParquetFile(folder / f"{part}.parquet").read() for part in ("train", "validation"))
    return train, validation


def documents(progress: bool = True) -> "pa.Table":
    """All texts, without the limit per library: the columns text, file and split ("train" or "validation")."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(_cache_folder(progress) / "documents.parquet").read()


def installed() -> tuple[dict[str, Path], dict[str, str], list[str]]:
    """The source folders and the versions of the libraries to read, by package; and the missing distributions."""
    roots: dict[str, Path] = {}
    versions: dict[str, str] = {}
    missing = []
    for package, distribution in LIBRARIES.items():
        spec = importlib.util.find_spec(package)  # does not import a top-level package
        if spec is None or spec.origin is None or not spec.submodule_search_locations:
            missing.append(distribution)
        elif len(roots) < MAX_LIBRARIES:
            roots[package] = Path(spec.submodule_search_locations[0])
            versions[package] = importlib.metadata.version(distribution)
    return roots, versions, missing


def required() -> tuple[dict[str, Path], dict[str, str], list[str]]:
    """The result of `installed`.

    Raises:
        UserError: too few of the libraries are installed.
    """
    roots, versions, missing = installed()
    if len(roots) < MIN_LIBRARIES:
        raise UserError(
            f"the embedded data need {MIN_LIBRARIES} of {len(LIBRARIES)} libraries ({', '.join(missing)} not "
            "installed): pip install -r requirements.txt, or use your own text with --train_file"
        )
    return roots, versions, missing


def _cache_folder(progress: bool) -> Path:
    """The cache folder with the three Parquet files for the installed versions; builds it if it is missing."""
    roots, versions, missing = required()

    def build(folder: Path) -> None:
        if progress:
            names = ", ".join(f"{package} {version}" for package, version in versions.items())
            aside = f" ({', '.join(missing)} not installed)" if missing else ""
            print(f"reading docstrings, once per machine, from {names}{aside}", file=sys.stderr, flush=True)
        _write(gather(roots, progress), folder)

    # The Python version is included because it determines which files can be parsed.
    content = json.dumps([FORMAT, sys.version_info[:2], versions])
    return build_once(f"docstrings-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}", build)


def gather(roots: Mapping[str, Path], progress: bool = False) -> "pa.Table":
    """The docstrings in each library's source folder: columns text, label, file and split, in a fixed random order.

    Texts that differ only in white space are duplicates: one of them is kept, or none if two libraries contain it.
    """
    import pyarrow as pa
    from tqdm import tqdm

    files = {name: path for label, root in roots.items() for name, path in sample_files(label, root)}
    found: dict[str, tuple[str, str]] = {}  # text with single spaces: (text, file)
    ambiguous = set()
    with tqdm(total=len(files), desc="reading sources", unit="file", disable=not progress) as bar:
        found_in_files = parse_in_processes(list(files.values()), "shared.datasets.demo_texts")
        for file, texts in zip(files, found_in_files, strict=True):
            for text in texts:
                key = " ".join(text.split())
                if len(key) >= MIN_CHARACTERS and _label(found.setdefault(key, (text, file))[1]) != _label(file):
                    ambiguous.add(key)
            bar.update()

    # Sorted by a hash of the text, so the first n rows are a random sample for any n; `_write` relies on this.
    keys = sorted(found.keys() - ambiguous, key=lambda key: (uniform_hash("order", key), key))
    rows = [found[key] for key in keys]
    return pa.table(
        {
            "text": [text for text, _ in rows],
            "label": [_label(file) for _, file in rows],
            "file": [file for _, file in rows],
            "split": ["validation" if in_validation(file) else "train" for _, file in rows],
        }
    )


def in_validation(file: str) -> bool:
    """Whether the docstrings of `file` (such as sympy/core/add.py) are for validation; independent of other files."""
    return uniform_hash("split", file) < VALIDATION_SHARE


def docstrings(source: bytes) -> list[str]:
    """The cleaned docstrings of a Python file, its classes and functions, in any order; [] if it cannot be parsed."""
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # code for a newer Python, or null bytes (a ValueError up to Python 3.11)
        return []
    texts = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            texts.append(text.encode(errors="ignore").decode())  # drops lone surrogates, which UTF-8 cannot encode
        for block in ("body", "orelse", "handlers", "finalbody"):  # unlike ast.walk, skips the many expressions
            pending.extend(getattr(node, block, ()))
    return texts


def sample_files(label: str, root: Path, most: int | None = None) -> list[tuple[str, Path]]:
    """Names and paths of at most `most` source files, selected by a hash of the name; tests are skipped.

    `most`: None for FILES_PER_LIBRARY.
    """
    paths = {f"{label}/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.py")}
    names = [name for name in paths if not {"test", "tests"} & set(name.split("/"))]
    names.sort(key=lambda name: (uniform_hash("sample", name), name))
    return [(name, paths[name]) for name in names[: FILES_PER_LIBRARY if most is None else most]]


def _label(file: str) -> str:
    return file.partition("/")[0]


def uniform_hash(purpose: str, text: str) -> float:
    """A number in [0, 1) that depends only on the arguments: the same in every process and on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def parse_in_processes(paths: list[Path], module: str) -> Iterator[list[Any]]:
    """Yield what `module` finds in each file, parsed in as many processes as there are cores, at most 8.

    `module._parse_files()` reads a JSON list of file names from stdin, and writes a JSON list with what it found in
    each to stdout. These are plain subprocesses: multiprocessing would either fork a process that has torch's threads,
    or import the caller's script again with all its imports.
    """
    chunks = [paths[start : start + FILES_PER_PROCESS] for start in range(0, len(paths), FILES_PER_PROCESS)]
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {module} as module; module._parse_files()"
    # -P keeps the working folder off the path; -W silences ast.parse's warnings about invalid escapes in libraries.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(Path(__file__).parents[2])]

    def read(chunk: list[Path]) -> list[list[Any]]:
        question = json.dumps([str(path) for path in chunk]).encode()
        answer = subprocess.run(command, input=question, stdout=subprocess.PIPE, check=True)
        return json.loads(answer.stdout)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for answers in pool.map(read, chunks):
            yield from answers


def _parse_files() -> None:
    """Read file names from stdin and write their docstrings to stdout, in a process of `parse_in_processes`."""
    json.dump([docstrings(Path(path).read_bytes()) for path in json.load(sys.stdin)], sys.stdout)


def _write(table: "pa.Table", folder: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table.select(["text", "file", "split"]), folder / "documents.parquet")
    seen: dict[str, int] = {}
    kept = []
    for label in table["label"].to_pylist():
        seen[label] = seen.get(label, 0) + 1
        kept.append(seen[label] <= TEXTS_PER_LIBRARY)
    table = table.filter(kept)
    for split in ("train", "validation"):
        side = [value == split for value in table["split"].to_pylist()]
        pq.write_table(table.filter(side).drop_columns(["split"]), folder / f"{split}.parquet")


def _report() -> None:
    """Print the figures of the README about the data: sizes, and the accuracy of simple methods on the same split."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    tables = dict(zip(("train", "validation"), load(), strict=True))
    texts = {split: table["text"].to_pylist() for split, table in tables.items()}
    labels = {split: np.array(table["label"].to_pylist()) for split, table in tables.items()}
    print(f"{'library':<14}{'train':>8}{'validation':>12}")
    for label in np.unique(labels["train"]):
        print(f"{label:<14}{(labels['train'] == label).sum():>8}{(labels['validation'] == label).sum():>12}")
    print(f"{'all':<14}{len(labels['train']):>8}{len(labels['validation']):>12}")
    lengths = [len(text) for text in texts["train"] + texts["validation"]]
    size = sum(len(text.encode()) for text in texts["train"] + texts["validation"])
    median, high = np.percentile(lengths, (50, 90))
    print(f"{size / 1e6:.1f} MB of text; characters per text: median {median:.0f}, 90th percentile {high:.0f}")
    everything = documents()["text"].to_pylist()
    print(f"documents: {len(everything)} texts, {sum(len(text.encode()) for text in everything) / 1e6:.1f} MB")

    names, counts = np.unique(labels["train"], return_counts=True)
    print(f"accuracy of the majority class: {(labels['validation'] == names[counts.argmax()]).mean():.3f}")
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=1000).fit(tfidf.fit_transform(texts["train"]), labels["train"])
    accuracy = model.score(tfidf.transform(texts["validation"]), labels["validation"])
    print(f"accuracy of TF-IDF (words and pairs of words) with logistic regression: {accuracy:.3f}")


if __name__ == "__main__":
    _report()
