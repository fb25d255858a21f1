"""Prepare the data of a recipe ahead of training, with any number of processes, on any number of machines.

    python -m shared.prepare recipes/mlm.py --train_file 'corpus/*.jsonl.zst'
    torchrun --nproc-per-node 16 -m shared.prepare recipes/mlm.py --train_file 'corpus/*.jsonl.zst'
    python -m shared.prepare --shard 3/64 recipes/mlm.py --train_file 'corpus/*.jsonl.zst'
    python -m shared.prepare recipes/nlp.py --train_file reviews.parquet
    python -m shared.prepare --to corpus_tokens recipes/mlm.py --train_file 'corpus/*.jsonl.zst'
    python -m shared.prepare recipes/image_classification.py --train_dir photos --cache uint8

It calls the recipe's `load_data`, which stores its results in the cache folder. Training with the same flags finds them
there. All processes with the same cache folder divide the corpus of recipes/mlm.py, the texts of recipes/nlp.py,
recipes/embeddings.py and recipes/token_classification.py, and the images of recipes/image_classification.py --cache
uint8, however the processes are started. All other data, and tables of few texts, are prepared by one process per
machine, and the others wait. After an interruption, the same command resumes.

--shard I/N is for the tasks of a job array, with I from 0 to N-1: the task prepares every N-th block of documents,
texts or images, and ends without waiting for the others. What is missing afterwards is prepared by the same command
without --shard, or by the training run.

--to FOLDER also copies the tokens of recipes/mlm.py, their index and their tokenizer to a folder. Copy this folder
wherever you like, such as to an object store, and train on it: recipes/mlm.py --prepared_data FOLDER, or its URL.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.cache.prepared import Unfinished, cache_dir, only_task
from shared.config import options
from shared.disk import is_url
from shared.errors import UserError, count_of, say
from shared.images.images import Images
from shared.run.recipes import load_recipe, run_work
from shared.text.prepared_folder import write_prepared
from shared.text.token_files import Corpus


def main(argv: Sequence[str]) -> None:
    """Prepare the data, and end this process with exit code 2 after a user error. Flags of the recipe come last."""
    usage = "%(prog)s [--shard I/N] [--to FOLDER] RECIPE [ITS FLAGS]"
    parser = argparse.ArgumentParser(
        "python -m shared.prepare", usage, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--shard", type=parse_task, default=(0, 1))
    either.add_argument("--to", type=folder_here)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    run_work(lambda: prepare(given.recipe, given.flags, given.shard, given.to))


def parse_task(value: str) -> tuple[int, int]:
    """The task I and the number of tasks N from "I/N"."""
    task, _, tasks = value.partition("/")
    if not (task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)):
        raise argparse.ArgumentTypeError(f"{value}: give I/N with I from 0 to N-1, as in 3/64")
    return int(task), int(tasks)


def folder_here(value: str) -> Path:
    """The folder `value` of this machine."""
    if is_url(value):
        raise argparse.ArgumentTypeError(f"{value} is a URL: give a folder of this machine, and copy it there")
    return Path(value)


def prepare(recipe: Path, flags: Sequence[str], task: tuple[int, int], folder: Path | None = None) -> None:
    """Prepare the data of a recipe, or those of one task, copy them to `folder`, and print what there is.

    Raises:
        UserError: a flag is wrong, or the data cannot be read or written.
    """
    began = time.monotonic()
    module = load_recipe(recipe)
    config = options.parse(module.Config, flags)
    try:
        with only_task(*task):
            loaded = module.load_data(config)
    except Unfinished as error:
        shard = f"--shard {task[0]}/{task[1]}: prepared in {time.monotonic() - began:.0f} s"
        say(f"{shard}; {error}, or to this command without --shard")
        return
    parts = dict(zip(("training", "validation"), loaded, strict=False))
    if folder:
        corpora = {name: each.file for name, each in parts.items() if isinstance(getattr(each, "file", None), Corpus)}
        if not corpora or config.prepared_data:
            raise UserError(
                f"--to {folder} has no effect on {recipe} with these flags, which read no documents: remove it"
            )
        if corpora["validation"] is corpora["training"]:  # documents are held out when the run starts
            del corpora["validation"]
        if int(os.environ.get("RANK", 0)) == 0:
            trained = None if config.model_name_or_path else (config.tokenizer_type, config.vocab_size)
            write_prepared(folder, corpora, loaded[2], trained)
    rows = {name: samples(data) for name, data in parts.items()}
    rows |= {"folder": str(folder or cache_dir()), "time": f"{time.monotonic() - began:.1f} s"}
    if int(os.environ.get("RANK", 0)) == 0:
        print("\n".join(f"{name:<12}{value}" for name, value in rows.items()))


def samples(data: object) -> str:
    """The numbers of samples and tokens of a data set, or of images."""
    if isinstance(data, Images):
        return count_of(len(data), "image")
    lengths = getattr(data, "lengths", None)
    tokens = "" if lengths is None else f", {count_of(int(lengths.sum(dtype=int)), 'token')} with special tokens"
    return f"{count_of(len(data), 'sample')}{tokens}"  # type: ignore[arg-type]  # a data set of a recipe has a length


if __name__ == "__main__":
    main(sys.argv[1:])
