"""The installed libraries whose sources are the default data: their files, samples of them, and their cached tables.

The data need no network. They are the same in every process for the same versions of the libraries.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cache.prepared import build_once
from shared.errors import UserError

if TYPE_CHECKING:  # the processes that parse files import this module and do not need pyarrow
    import pyarrow as pa

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
FILES_PER_LIBRARY = 600  # at most
VALIDATION_SHARE = 0.15
FILES_PER_PROCESS = 200


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


def required() -> tuple[dict[str, Path], dict[str, str]]:
    """The source folders and the versions of the libraries to read, by package.

    Raises:
        UserError: too few of the libraries are installed.
    """
    roots, versions, missing = installed()
    if len(roots) < MIN_LIBRARIES:
        raise UserError(
            f"the embedded data need {MIN_LIBRARIES} of {len(LIBRARIES)} libraries ({', '.join(missing)} not "
            "installed): pip install -r requirements.txt, or use your own text with --train_file"
        )
    return roots, versions


def cached_tables(
    name: str, key: object, reading: str, versions: Mapping[str, str], make: Callable[[], "Mapping[str, pa.Table]"]
) -> "dict[str, pa.Table]":
    """The tables that `make` returns, by their names, from the cache; the first process on a machine makes them.

    Args:
        name: of the data.
        key: what the tables depend on, except the version of Python, which determines what can be parsed.
        reading: what is read, for a message on stderr, because it takes some seconds.
        versions: of the libraries that are read, by package; for the message.
        make: makes the tables.
    """
    import pyarrow.parquet as pq

    def build(folder: Path) -> None:
        names = ", ".join(f"{package} {version}" for package, version in versions.items())
        print(f"reading {reading}, once per machine, from {names}", file=sys.stderr, flush=True)
        for part, table in make().items():
            pq.write_table(table, folder / f"{part}.parquet")

    content = json.dumps([key, sys.version_info[:2], versions])
    folder = build_once(f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}", build)
    return {path.stem: pq.ParquetFile(path).read() for path in sorted(folder.glob("*.parquet"))}


def in_splits(table: "pa.Table") -> "dict[str, pa.Table]":
    """The rows of each split, by the column split, which is left out."""
    splits = table["split"].to_pylist()
    return {
        part: table.filter([split == part for split in splits]).drop_columns(["split"])
        for part in ("train", "validation")
    }


def in_validation(file: str) -> bool:
    """Whether the docstrings of `file` (such as sympy/core/add.py) are for validation; independent of other files."""
    return uniform_hash("split", file) < VALIDATION_SHARE


def sample_files(label: str, root: Path, most: int | None = None) -> list[tuple[str, Path]]:
    """Names and paths of at most `most` source files, selected by a hash of the name; tests are skipped.

    `most`: None for FILES_PER_LIBRARY.
    """
    paths = {f"{label}/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.py")}
    names = [name for name in paths if not {"test", "tests"} & set(name.split("/"))]
    names.sort(key=lambda name: (uniform_hash("sample", name), name))
    return [(name, paths[name]) for name in names[: FILES_PER_LIBRARY if most is None else most]]


def uniform_hash(purpose: str, text: str) -> float:
    """A number in [0, 1) that depends only on the arguments: the same in every process and on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def parse_in_processes(paths: list[Path], parse: Callable[[bytes], list[Any]]) -> Iterator[list[Any]]:
    """Yield `parse(content)` for each file, in as many processes as there are cores, at most 8.

    These are plain subprocesses: multiprocessing would either fork a process that has torch's threads, or import the
    caller's script again with all its imports. `parse` is a function of a module, and returns lists of texts.
    """
    chunks = [paths[start : start + FILES_PER_PROCESS] for start in range(0, len(paths), FILES_PER_PROCESS)]
    code = (
        "import json, pathlib, sys; sys.path.insert(0, sys.argv[1]); "
        f"from {parse.__module__} import {parse.__name__} as parse; "
        "json.dump([parse(pathlib.Path(path).read_bytes()) for path in json.load(sys.stdin)], sys.stdout)"
    )
    # -P keeps the working folder off the path; -W silences ast.parse's warnings about invalid escapes in libraries.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(Path(__file__).parents[2])]

    def read(chunk: list[Path]) -> list[list[Any]]:
        question = json.dumps([str(path) for path in chunk]).encode()
        answer = subprocess.run(command, input=question, stdout=subprocess.PIPE, check=True)
        return json.loads(answer.stdout)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for answers in pool.map(read, chunks):
            yield from answers
