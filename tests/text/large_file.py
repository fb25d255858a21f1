"""Load a text file as recipes/nlp.py does, with a limit on the memory of this process. `test_large_texts.py` runs it.

    python tests/text/large_file.py BYTES FLAGS_OF_THE_RECIPE

Prints the numbers of training and validation texts, the digest of the training data, and the peak of the memory above
the start, in MiB.
"""

import importlib.util
import resource
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from shared.config import options
from shared.datasets import arrow_files, readers, splits
from shared.losses.losses import shape_of_run
from shared.plan.batches import Plan
from shared.plan.loading import Loader
from shared.text import table_texts
from shared.text.tokenized import Padding, tokenize, train_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = 1 << 20  # bytes of blocks, so that a small file is a large one


def memory_in_use() -> int:
    """The bytes of data and stack of this process; maps of files are not counted."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def main(limit: int, flags: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("nlp", ROOT / "recipes/nlp.py")
    nlp = importlib.util.module_from_spec(spec)
    sys.modules["nlp"] = nlp
    spec.loader.exec_module(nlp)
    config = options.parse(nlp.Config, flags)
    small = train_tokenizer(pa.table({"text": ["one two"]}), ("text",), "bpe", 300, 32)
    tokenize(pa.table({"text": ["one two"]}), ("text",), small, 32)  # imports
    threading.stack_size(1 << 18)  # of the thread below and of progress bars; stacks are part of the memory
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with tempfile.TemporaryDirectory() as folder:  # starts the threads of Arrow, whose stacks are not measured
        for name, content in (("a.jsonl", '{"text": "a"}\n'), ("a.csv", "text\na\n")):
            (Path(folder) / name).write_text(content)
            list(readers.blocks(Path(folder) / name, name))
    start, peak, done = memory_in_use(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], memory_in_use())

    resource.setrlimit(resource.RLIMIT_DATA, (start + limit, start + limit))
    threading.Thread(target=watch, daemon=True).start()
    train, validation, labels, _ = nlp.load_data(config)
    digest = train.digest()
    weights = shape_of_run(config, labels.kind, labels.names, train.targets, torch.device("cpu")).sample_weights
    plan = Plan(lengths=train.lengths, weights=weights, seed=0, global_batch_size=64, max_steps=3)
    for step in range(3):
        for _, batch in Loader(train, plan, Padding(0), torch.device("cpu")).micro_batches(step):
            assert len(batch["labels"])
    done.set()
    print(len(train), len(validation), np.bincount(train.targets).tolist(), digest, (peak[0] - start) >> 20)


readers.BLOCK_BYTES = SMALL // 4
arrow_files.IN_MEMORY = SMALL
table_texts.BATCH_BYTES = SMALL // 8
splits.BLOCK = splits.SORTED = 1 << 12
main(int(sys.argv[1]), sys.argv[2:])
