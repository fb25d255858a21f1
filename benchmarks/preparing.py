"""Measure how fast one and two processes tokenize texts and decode images, and the memory that they need.

    python benchmarks/preparing.py --output_dir out/preparing

`python -m shared.prepare` prepares each kind of data in an empty cache folder:

- jsonl, jsonl.zst: a corpus for recipes/mlm.py, in one file: the embedded docstrings, repeated with numbers
- parts.zst: the same corpus in 8 compressed files
- table: the beginnings of these docstrings with labels, for recipes/nlp.py
- photos: JPEGs of 500 x 375 pixels, decoded to squares of 256 pixels, with one core for each process. At most 500 JPEGs
  differ; further files are links to them.

The WordPiece tokenizer exists already, and its own threads are off. The launches take turns. Figures of each:

- seconds: from the start of the processes to the end of the last one, with all imports
- cpu_seconds: of the process with most of it, on a processor; for a machine that has other work
- peak_mib: resident memory of the largest process, with imports and the pages of mapped files, which processes share
- own_mib: the largest memory that belonged to one process alone; both are looked up ten times a second

Writes preparing.json and preparing.md into the output folder. The corpus, the JPEGs and the caches are removed at the
end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, plan_of_size, rounds
from benchmarks.harness.photos import write_photos

PARTS = 8  # compressed files
CORPUS = {"jsonl": ["corpus.jsonl"], "jsonl.zst": ["corpus.jsonl.zst"]}
CORPUS["parts.zst"] = [f"parts/{part}.jsonl.zst" for part in range(PARTS)]
KINDS = (*CORPUS, "table", "photos")
DIFFERENT = 500  # photos
CHARACTERS = 150  # of a text of the table
RECIPES = launching.ROOT / "recipes"
MIB = 1 << 20
VOCABULARY = 8192


def docstrings() -> list[str]:
    """The embedded texts."""
    from shared.demo_data import texts

    return [text for part in texts.documents() for text in part["text"].to_pylist()]


def numbered_docstrings() -> Iterator[str]:
    """The embedded texts, over and over, with a number before each."""
    texts = docstrings()
    return (f"{copy} {text}" for copy in count() for text in texts)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that is trained on the docstrings, with the config of a model."""
    import pyarrow as pa
    from transformers import BertConfig

    from shared.demo_data import texts
    from shared.text.tokenized import train_tokenizer

    documents = pa.concat_tables(texts.documents())
    train_tokenizer(documents, ("text",), "wordpiece", VOCABULARY, 512).save_pretrained(folder)
    BertConfig(vocab_size=VOCABULARY).save_pretrained(folder)


def write_corpus(folder: Path, kind: str, size: int) -> None:
    """Write `size` bytes of docstrings as JSON lines into the files of a kind, which get a line in turn."""
    import pyarrow as pa

    (folder / "parts").mkdir(exist_ok=True)
    written = 0
    with ExitStack() as stack:
        files = cycle([stack.enter_context(pa.output_stream(str(folder / name))) for name in CORPUS[kind]])
        for text, file in zip(numbered_docstrings(), files, strict=False):
            line = json.dumps({"text": text}).encode() + b"\n"
            file.write(line)
            written += len(line)
            if written >= size:
                break


def write_table(path: Path, rows: int) -> None:
    """Write the beginnings of numbered docstrings with two labels."""
    with path.open("w") as file:
        for text, label in zip(islice(numbered_docstrings(), rows), cycle("ab"), strict=False):
            file.write(json.dumps({"text": text[:CHARACTERS], "label": label}) + "\n")


def prepare(folder: Path, kind: str, processes: int) -> rounds.Row:
    """Prepare the corpus or the photos with some processes; the figures that the module's docstring describes."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [str(word) for word in (sys.executable, "-m", "shared.prepare", *recipe_and_flags(folder, kind))]
        of_launch = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        environment = launching.environment() | of_launch | {"ACCELERATE_RECIPES_CACHE": cache}
        began = time.perf_counter()
        with (folder / "log.txt").open("w") as log:
            started = [
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
                for rank in range(processes)
            ]
            if kind == "photos":
                for process, core in zip(started, cycle(os.sched_getaffinity(0)), strict=False):
                    os.sched_setaffinity(process.pid, {core})
            found = watch(started)
        seconds = time.perf_counter() - began
        if any(process.returncode for process in started):
            raise RuntimeError(f"the preparation failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return {"seconds": seconds} | found


def recipe_and_flags(folder: Path, kind: str) -> list[Any]:
    """The recipe that reads the data of a kind, and its flags."""
    if kind == "photos":
        sizes = ("--image_size", 224, "--decode_size", 256)
        return [RECIPES / "image_classification.py", "--train_dir", folder / "photos", "--cache", "uint8", *sizes]
    model = ("--model_name_or_path", folder / "tokenizer")
    if kind in CORPUS:
        return [RECIPES / "mlm.py", "--train_file", folder / CORPUS[kind][0].replace("0.", "*."), *model]
    files = ("--train_file", folder / "many.jsonl", "--validation_file", folder / "few.jsonl")
    return [RECIPES / "nlp.py", *files, *model]


def watch(processes: list[subprocess.Popen]) -> dict[str, float]:
    """Wait for the processes; the figures of the largest one, and CPU seconds of the one with most of them."""
    found = {"cpu_seconds": 0.0, "peak_mib": 0.0, "own_mib": 0.0}
    running = list(processes)
    while running:
        time.sleep(0.1)
        for process in [*running]:
            with suppress(StopIteration):  # a process that has ended has no such lines
                # not ru_maxrss, which counts the memory of this process until the exec
                found["peak_mib"] = max(found["peak_mib"], plan_of_size.resident("VmHWM", process.pid))
                found["own_mib"] = max(found["own_mib"], plan_of_size.resident("RssAnon", process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                found["cpu_seconds"] = max(found["cpu_seconds"], usage.ru_utime + usage.ru_stime)
                running.remove(process)
    return found


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/preparing")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the corpus as JSON lines, in MiB")
    parser.add_argument("--rows", type=int, default=200_000, help="number of texts in the table")
    parser.add_argument("--photos", type=int, default=6000, help="number of JPEGs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is prepared")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="processes of the launches")
    arguments = parser.parse_args()
    turns = [(kind, count) for kind in arguments.kinds for count in arguments.processes]
    contestants = {f"{kind}, {count} process{'es' * (count > 1)}": (kind, count) for kind, count in turns}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        for kind in arguments.kinds:
            if kind in CORPUS:
                write_corpus(folder, kind, arguments.megabytes * MIB)
        if "table" in arguments.kinds:
            write_table(folder / "many.jsonl", arguments.rows)
            write_table(folder / "few.jsonl", 100)
        if "photos" in arguments.kinds:
            write_photos(folder / "photos", arguments.photos, DIFFERENT)
        rows = rounds.take_turns(list(contestants), arguments.rounds, lambda one, _: prepare(folder, *contestants[one]))
    comparisons = {
        f"{figure} of one process / two processes, {kind}": rounds.compare(
            rows, figure, f"{kind}, 1 process", f"{kind}, 2 processes"
        )
        for kind in arguments.kinds
        for figure in ("seconds", "cpu_seconds")
        if {1, 2} <= {*arguments.processes}
    }
    rounds.save(arguments, "preparing", max(arguments.processes), rows, comparisons)


if __name__ == "__main__":
    main()
