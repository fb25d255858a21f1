"""Measure how fast one and two processes tokenize texts and decode images, and the memory that they need.

    python benchmarks/preparing.py --output_dir out/preparing

The corpus is one file of the embedded docstrings, repeated with numbers, as JSON lines and compressed with zstd.
`python -m shared.prepare` tokenizes it into an empty cache folder, with a WordPiece tokenizer that exists already and
without the tokenizer's own threads. The table is a file of the beginnings of these docstrings with labels, for
recipes/nlp.py. It decodes JPEGs of 500 x 375 pixels to squares of 256 pixels; then each process
has one core. At most 500 JPEGs differ; further files are links to them. The launches take turns. Figures of each:

- seconds: from the start of the processes to the end of the last one, with all imports
- cpu_seconds: of the process with most of it, on a processor; for a machine that has other work
- peak_mib: resident memory of the largest process, with imports and mapped files

Writes preparing.json and preparing.md into the output folder. The corpus, the JPEGs and the caches are removed at the
end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, rounds
from benchmarks.harness.photos import write_photos

KINDS = ("jsonl", "jsonl.zst", "table", "photos")
PROCESSES = (1, 2)
DIFFERENT = 500  # photos
CHARACTERS = 150  # of a text of the table
RECIPES = launching.ROOT / "recipes"
MIB = 1 << 20


def write_corpus(folder: Path, size: int) -> None:
    """Write `size` bytes of docstrings to corpus.jsonl and corpus.jsonl.zst, and a tokenizer to tokenizer/."""
    import pyarrow as pa
    from transformers import BertConfig

    from shared.datasets import demo_texts
    from shared.text.tokenized import train_tokenizer

    table = demo_texts.documents().select(["text"])
    train_tokenizer(table, ("text",), "wordpiece", 8192, 512).save_pretrained(folder / "tokenizer")
    BertConfig(vocab_size=8192).save_pretrained(folder / "tokenizer")
    texts, written, copy = table["text"].to_pylist(), 0, 0
    compressed = pa.CompressedOutputStream(folder / "corpus.jsonl.zst", "zstd")
    with (folder / "corpus.jsonl").open("wb") as file, compressed:
        while written < size:
            for text in texts:
                line = json.dumps({"text": f"{copy} {text}"}).encode() + b"\n"
                file.write(line)
                compressed.write(line)
                written += len(line)
                if written >= size:
                    break
            copy += 1


def write_table(path: Path, rows: int) -> None:
    """Write the beginnings of docstrings, repeated with numbers, with two labels."""
    from shared.datasets import demo_texts

    texts = demo_texts.documents()["text"].to_pylist()
    with path.open("w") as file:
        for row in range(rows):
            line = {"text": f"{row} {texts[row % len(texts)][:CHARACTERS]}", "label": "ab"[row % 2]}
            file.write(json.dumps(line) + "\n")


def write_linked_photos(folder: Path, count: int) -> None:
    """Write `count` JPEGs, of which at most DIFFERENT differ; the others are hard links."""
    write_photos(folder, min(count, DIFFERENT))
    different = sorted(folder.rglob("*.jpg"))
    for number, path in zip(range(len(different), count), cycle(different), strict=False):
        os.link(path, path.with_name(f"{number:06}.jpg"))


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
            usages = [wait(process) for process in started]
        seconds = time.perf_counter() - began
        if any(process.returncode for process in started):
            raise RuntimeError(f"the preparation failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": max(usage.ru_utime + usage.ru_stime for usage in usages),
        "peak_mib": max(usage.ru_maxrss for usage in usages) / 1024,
    }


def recipe_and_flags(folder: Path, kind: str) -> list[Any]:
    """The recipe that reads the data of a kind, and its flags."""
    if kind == "photos":
        sizes = ("--image_size", 224, "--decode_size", 256)
        return [RECIPES / "image_classification.py", "--train_dir", folder / "photos", "--cache", "uint8", *sizes]
    if kind == "table":
        files = ("--train_file", folder / "table.jsonl", "--validation_file", folder / "few.jsonl")
        return [RECIPES / "nlp.py", *files, "--model_name_or_path", folder / "tokenizer"]
    corpus = ("--train_file", folder / f"corpus.{kind}")
    return [RECIPES / "mlm.py", *corpus, "--model_name_or_path", folder / "tokenizer"]


def wait(process: subprocess.Popen) -> Any:
    """Wait for a process and return its resource usage."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/preparing")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the corpus as JSON lines, in MiB")
    parser.add_argument("--rows", type=int, default=200_000, help="number of texts in the table")
    parser.add_argument("--photos", type=int, default=6000, help="number of JPEGs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is prepared")
    arguments = parser.parse_args()
    turns = [(kind, count) for kind in arguments.kinds for count in PROCESSES]
    contestants = {f"{kind}, {count} process{'es' * (count > 1)}": (kind, count) for kind, count in turns}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"jsonl", "jsonl.zst", "table"}.intersection(arguments.kinds):
            write_corpus(folder, arguments.megabytes * MIB if {*arguments.kinds} - {"table", "photos"} else 0)
        if "table" in arguments.kinds:
            write_table(folder / "table.jsonl", arguments.rows)
            write_table(folder / "few.jsonl", 100)
        if "photos" in arguments.kinds:
            write_linked_photos(folder / "photos", arguments.photos)
        rows = rounds.take_turns(list(contestants), arguments.rounds, lambda one, _: prepare(folder, *contestants[one]))
    comparisons = {
        f"{figure} of one process / two processes, {kind}": rounds.compare(
            rows, figure, f"{kind}, 1 process", f"{kind}, 2 processes"
        )
        for kind in arguments.kinds
        for figure in ("seconds", "cpu_seconds")
    }
    rounds.save(arguments, "preparing", max(PROCESSES), rows, comparisons)


if __name__ == "__main__":
    main()
