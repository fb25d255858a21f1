"""The installed libraries whose sources are the default data: samples of their files, and the cached tables.

The data need no network. They are the same in every process for the same versions of the libraries.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import UserError

if TYPE_CHECKING:  # the processes of `parsed` need no tables
    import pyarrow as pa

FORMAT = 2  # part of the cache's names: increase it when a change in this folder changes the data
LIBRARIES = {  # package: distribution; requirements.txt installs all
    "transformers": "transformers",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "sympy": "sympy",
    "networkx": "networkx",
}
FILES_PER_LIBRARY = 600  # at most
VALIDATION_SHARE = 0.15
FILES_PER_PROCESS = 200

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.Module | ast.ClassDef | Function


def installed() -> dict[str, tuple[Path, str]]:
    """The source folder and the version of each library, by package.

    Raises:
        UserError: one of the libraries is not installed.
    """
    found: dict[str, tuple[Path, str]] = {}
    for package, distribution in LIBRARIES.items():
        spec = importlib.util.find_spec(package)  # does not import a top-level package
        if spec is None or spec.origin is None:
            raise UserError(
                f"the embedded data need {distribution}, which is not installed: pip install -r requirements.txt, or "
                "use your own text with --train_file"
            )
        found[package] = Path(spec.origin).parent, importlib.metadata.version(distribution)
    return found


def cached_table(name: str, gather: Callable[[dict[str, Path]], list[dict[str, Any]]], without: str = "") -> pa.Table:
    """The table that `gather` returns, from the cache; the first process on a machine makes it.

    Args:
        name: of the data.
        gather: makes the rows of the table from the source folders, by package.
        without: a package that is left out.

    Raises:
        UserError: one of the libraries is not installed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shared.cache.prepared import build_once, key_digest

    found = {package: library for package, library in installed().items() if package != without}
    versions = {package: version for package, (_, version) in found.items()}

    def build(folder: Path) -> None:
        names = ", ".join(f"{package} {version}" for package, version in versions.items())
        print(f"reading {name}, once per machine, from {names}", file=sys.stderr, flush=True)  # it takes some seconds
        rows = gather({package: root for package, (root, _) in found.items()})
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")

    # The version of Python determines what can be parsed.
    folder = build_once(f"{name}-{key_digest(FORMAT, sys.version_info[:2], versions)}", build)
    return pq.ParquetFile(folder / "rows.parquet").read()


def in_splits(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The training and the validation rows, by the column split, which is left out."""
    import pyarrow.compute as pc

    parts = (table.filter(pc.equal(table["split"], part)) for part in ("train", "validation"))
    train, validation = (part.drop_columns(["split"]) for part in parts)
    return train, validation


def split_of(file: str) -> str:
    """The split of everything in `file` (such as sympy/core/add.py); independent of other files."""
    return "validation" if uniform_hash("split", file) < VALIDATION_SHARE else "train"


def sample_files(roots: Mapping[str, Path], most: int) -> dict[str, Path]:
    """At most `most` source files of each library, by their names; a hash of the name selects them; tests are skipped.

    `roots` are the source folders, by package.
    """
    sample: dict[str, Path] = {}
    for label, root in roots.items():
        paths = {f"{label}/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.py")}
        names = [name for name in paths if not {"test", "tests"} & set(name.split("/"))]
        names.sort(key=lambda name: (uniform_hash("sample", name), name))
        sample |= {name: paths[name] for name in names[:most]}
    return sample


def uniform_hash(purpose: str, text: str) -> float:
    """A number in [0, 1) that depends only on the arguments: the same in every process and on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def parsed(
    roots: Mapping[str, Path], parse: Callable[[bytes], list[Any]], most: int
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each file of a sample of `most` per library, and `parse(content)`, with a progress bar.

    Up to 8 processes parse, as many as there are cores. They are plain subprocesses: multiprocessing would either fork
    a process that has torch's threads, or import the caller's script again with all its imports. `parse` is a function
    of a module, and returns what JSON can hold.
    """
    from tqdm import tqdm

    files = sample_files(roots, most)
    paths = [str(path) for path in files.values()]
    chunks = [paths[start : start + FILES_PER_PROCESS] for start in range(0, len(paths), FILES_PER_PROCESS)]
    code = (
        "import json, pathlib, sys; sys.path.insert(0, sys.argv[1]); "
        f"from {parse.__module__} import {parse.__name__} as parse; "
        "json.dump([parse(pathlib.Path(path).read_bytes()) for path in json.load(sys.stdin)], sys.stdout)"
    )
    # -P keeps the working folder off the path; -W silences ast.parse's warnings about invalid escapes in libraries.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(Path(__file__).parents[2])]

    def read(chunk: list[str]) -> list[list[Any]]:
        answer = subprocess.run(command, input=json.dumps(chunk).encode(), stdout=subprocess.PIPE, check=True)
        return json.loads(answer.stdout)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        answers = chain.from_iterable(pool.map(read, chunks))
        yield from tqdm(zip(files, answers, strict=True), desc="reading sources", total=len(files), unit="file")


def definitions(source: bytes, in_functions: bool) -> Iterator[Definition]:
    """Yield a module, its classes and its functions, in any order; nothing if the source cannot be parsed.

    `in_functions`: whether those inside of functions are among them.
    """
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # code for a newer Python, or null bytes (a ValueError up to Python 3.11)
        return
    while pending:
        node = pending.pop()
        if isinstance(node, Definition):
            yield node
        if in_functions or not isinstance(node, Function):
            for block in ("body", "orelse", "handlers", "finalbody"):  # unlike ast.walk, skips the many expressions
                pending.extend(getattr(node, block, ()))


def docstring_of(node: Definition) -> str:
    """The cleaned docstring of a definition; "" if it has none."""
    text = ast.get_docstring(node) or ""
    return text.encode(errors="ignore").decode()  # drops lone surrogates, which UTF-8 cannot encode
