"""Measure how fast one and two processes tokenize texts and decode images, and the memory that they need.

    python benchmarks/preparing.py --output_dir out/preparing

`python -m shared.prepare` prepares each kind of data in an empty cache folder:

- jsonl, jsonl.zst: a corpus for recipes/mlm.py, in one file: the embedded docstrings, repeated with numbers
- parts.zst: the same corpus in 8 compressed files
- table: the beginnings of these docstrings with labels, for recipes/nlp.py
- conll: the words of these docstrings with tags, for recipes/token_classification.py
- photos: JPEGs of 500 x 375 pixels, decoded to squares of 256 pixels, with one core for each process. At most 500 JPEGs
  differ; further files are links to them.

The WordPiece tokenizer exists already, and its own threads are off. The launches take turns. Figures of each:

- seconds: from the start of the processes to the end of the last one, with all imports
- cpu_seconds: of the process with most of it, on a processor; for a machine that has other work
- peak_mib: resident memory of the largest process, with imports and the pages of mapped files, which processes share
- own_mib: the largest memory that belonged to one process alone, looked up ten times a second

    python benchmarks/preparing.py --megabytes 10240 --kinds jsonl --processes 2 --tokenizer words --rounds 1

measures the memory for 10 GiB of text. This tokenizer divides texts at spaces into words, which is four times as fast.

Writes preparing.json and preparing.md into the output folder. The corpus, the JPEGs and the caches are removed at the
end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, plan_of_size, rounds
from benchmarks.harness.photos import write_photos

CORPUS = ("jsonl", "jsonl.zst", "parts.zst")
KINDS = (*CORPUS, "table", "conll", "photos")
PARTS = 8  # compressed files
DIFFERENT = 500  # photos
CHARACTERS = 150  # of a text of the table
RECIPES = launching.ROOT / "recipes"
MIB = 1 << 20
VOCABULARY = 8192


def write_corpus(folder: Path, size: int, kinds: Iterable[str], tokenizer: str) -> None:
    """Write `size` bytes of docstrings as files of these kinds, corpus.KIND or parts/, and the tokenizer."""
    from transformers import BertConfig

    from shared.demo_data import texts as demo_texts
    from shared.text.tokenized import train_tokenizer

    table = demo_texts.documents().select(["text"])
    trained = train_tokenizer(table, ("text",), "wordpiece", VOCABULARY, 512)
    if tokenizer == "words":
        from tokenizers import pre_tokenizers

        trained.backend_tokenizer.model = most_frequent_words(table["text"].to_pylist(), [*trained.all_special_tokens])
        trained.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained.save_pretrained(folder / "tokenizer")
    BertConfig(vocab_size=VOCABULARY).save_pretrained(folder / "tokenizer")
    texts, written, copy = table["text"].to_pylist(), 0, 0
    with ExitStack() as stack:
        files: list[list[Any]] = []  # of each kind; they get a line in turn
        if "jsonl" in kinds:
            files.append([stack.enter_context((folder / "corpus.jsonl").open("wb"))])
        if "jsonl.zst" in kinds:
            files.append([compressed(stack, folder / "corpus.jsonl.zst")])
        if "parts.zst" in kinds:
            (folder / "parts").mkdir()
            files.append([compressed(stack, folder / f"parts/{part}.jsonl.zst") for part in range(PARTS)])
        while written < size:
            for number, text in enumerate(texts):
                line = json.dumps({"text": f"{copy} {text}"}).encode() + b"\n"
                for parts in files:
                    parts[number % len(parts)].write(line)
                written += len(line)
                if written >= size:
                    break
            copy += 1


def compressed(stack: ExitStack, path: Path) -> Any:
    """A new file compressed with zstd, open for writing until the end of the stack."""
    import pyarrow as pa

    return stack.enter_context(pa.CompressedOutputStream(path, "zstd"))


def most_frequent_words(texts: list[str], special: list[str]) -> Any:
    """The model of a tokenizer whose vocabulary is the special tokens and the most frequent words."""
    from tokenizers import models

    counts = Counter(word for text in texts for word in text.split())
    words = [word for word, _ in counts.most_common(VOCABULARY) if word not in special]
    vocabulary = {word: number for number, word in enumerate([*special, *words][:VOCABULARY])}
    return models.WordLevel(vocabulary, unk_token="[UNK]")


def write_table(path: Path, rows: int) -> None:
    """Write the beginnings of docstrings, repeated with numbers, with two labels."""
    from shared.demo_data import texts as demo_texts

    texts = demo_texts.documents()["text"].to_pylist()
    with path.open("w") as file:
        for row in range(rows):
            line = {"text": f"{row} {texts[row % len(texts)][:CHARACTERS]}", "label": "ab"[row % 2]}
            file.write(json.dumps(line) + "\n")


def write_conll(path: Path, words: int) -> None:
    """Write words of docstrings, one in a line, with a tag for those that begin with a capital letter."""
    from shared.demo_data import texts as demo_texts

    left = words
    with path.open("w") as file:
        for text in cycle(demo_texts.documents()["text"].to_pylist()):
            sentence = text.split()[:left]
            file.writelines(f"{word}\t{'B-CAPITAL' if word[0].isupper() else 'O'}\n" for word in sentence)
            file.write("\n")
            left -= len(sentence)
            if not left:
                break


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
            own_mib, usages = watch(started)
        seconds = time.perf_counter() - began
        if any(process.returncode for process in started):
            raise RuntimeError(f"the preparation failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": max(usage.ru_utime + usage.ru_stime for usage in usages),
        "peak_mib": max(usage.ru_maxrss for usage in usages) / 1024,
        "own_mib": own_mib,
    }


def recipe_and_flags(folder: Path, kind: str) -> list[Any]:
    """The recipe that reads the data of a kind, and its flags."""
    if kind == "photos":
        sizes = ("--image_size", 224, "--decode_size", 256)
        return [RECIPES / "image_classification.py", "--train_dir", folder / "photos", "--cache", "uint8", *sizes]
    if kind == "table":
        files = ("--train_file", folder / "table.jsonl", "--validation_file", folder / "few.jsonl")
        return [RECIPES / "nlp.py", *files, "--model_name_or_path", folder / "tokenizer"]
    if kind == "conll":
        files = ("--train_file", folder / "words.conll", "--validation_file", folder / "few.conll")
        return [RECIPES / "token_classification.py", *files, "--model_name_or_path", folder / "tokenizer"]
    corpus = ("--train_file", folder / ("parts/*.jsonl.zst" if kind == "parts.zst" else f"corpus.{kind}"))
    return [RECIPES / "mlm.py", *corpus, "--model_name_or_path", folder / "tokenizer"]


def watch(processes: list[subprocess.Popen]) -> tuple[float, list[Any]]:
    """Wait for the processes; the largest memory of one alone, in MiB, and the resource usage of each."""
    own, usages = 0.0, {}
    while len(usages) < len(processes):
        time.sleep(0.1)
        for process in processes:
            if process.pid in usages:
                continue
            with suppress(StopIteration):  # a process that has ended has no such line
                own = max(own, plan_of_size.resident("RssAnon", process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                process.returncode, usages[ended] = os.waitstatus_to_exitcode(status), usage
    return own, [usages[process.pid] for process in processes]


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/preparing")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the corpus as JSON lines, in MiB")
    parser.add_argument("--rows", type=int, default=200_000, help="number of texts in the table")
    parser.add_argument("--words", type=int, default=2_000_000, help="number of words with tags")
    parser.add_argument("--photos", type=int, default=6000, help="number of JPEGs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is prepared")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="processes of the launches")
    parser.add_argument("--tokenizer", choices=("wordpiece", "words"), default="wordpiece", help="of the corpus")
    arguments = parser.parse_args()
    turns = [(kind, count) for kind in arguments.kinds for count in arguments.processes]
    contestants = {f"{kind}, {count} process{'es' * (count > 1)}": (kind, count) for kind, count in turns}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {*CORPUS, "table", "conll"}.intersection(arguments.kinds):
            size = arguments.megabytes * MIB if {*CORPUS}.intersection(arguments.kinds) else 0
            write_corpus(folder, size, arguments.kinds, arguments.tokenizer)
        if "table" in arguments.kinds:
            write_table(folder / "table.jsonl", arguments.rows)
            write_table(folder / "few.jsonl", 100)
        if "conll" in arguments.kinds:
            write_conll(folder / "words.conll", arguments.words)
            write_conll(folder / "few.conll", 1000)
        if "photos" in arguments.kinds:
            write_linked_photos(folder / "photos", arguments.photos)
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
