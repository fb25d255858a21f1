"""Measure how fast shared/text/token_files.py tokenizes a corpus, against datasets.map with two processes.

    python benchmarks/tokenizing.py --output_dir out/tokenizing

Both tokenize the embedded docstrings with the same WordPiece tokenizer, in turns, without a cache. Prints the seconds
of each round and the ratio, and writes tokenizing.json into the output folder, with the number of tokens.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, default=Path("out/tokenizing"))
    arguments = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    import datasets

    from shared.datasets import demo_texts
    from shared.datasets.documents import of_table
    from shared.text.token_files import tokenize_documents
    from shared.text.tokenized import train_tokenizer

    table = demo_texts.documents().select(["text"])
    tokenizer = train_tokenizer(table, ("text",), "wordpiece", 8192, 512)
    dataset = datasets.Dataset(table)
    datasets.disable_progress_bars()

    def ours(folder: str) -> int:
        os.environ |= {"ACCELERATE_RECIPES_CACHE": folder, "TOKENIZERS_PARALLELISM": "true"}
        return len(tokenize_documents(of_table(table, "text"), tokenizer).tokens)

    def theirs(folder: str) -> int:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        mapped = dataset.map(
            lambda batch: tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False),
            batched=True,
            num_proc=2,
            remove_columns=["text"],
            cache_file_name=f"{folder}/mapped.arrow",
            load_from_cache_file=False,
        )
        return len(mapped)

    rounds: list[tuple[float, float]] = []
    tokens = 0
    for _ in range(arguments.rounds):
        seconds = []
        for run in (ours, theirs):
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                found = run(folder)
                seconds.append(time.perf_counter() - started)
            tokens = found if run is ours else tokens
        rounds.append((seconds[0], seconds[1]))
        print(f"ours {seconds[0]:.2f} s, datasets.map(batched=True, num_proc=2) {seconds[1]:.2f} s", flush=True)
    report = {
        "machine": machine(2),
        "command": command(),
        "rows": [{"ours": ours, "datasets.map": theirs} for ours, theirs in rounds],  # seconds
        "tokens": tokens,
        "faster": statistics.median(theirs / ours for ours, theirs in rounds),
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "tokenizing.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"ratio, median of rounds: {report['faster']:.2f}")


if __name__ == "__main__":
    main()
