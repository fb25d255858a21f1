"""Measure how many texts per second `python -m shared.predict` predicts, beside transformers' `pipeline`.

    python benchmarks/predictions.py --output_dir out/predictions

A BERT with random weights (4 layers x 256) predicts docstrings of mixed lengths, of up to 512 tokens, on one process.
The contestants take turns, each on the same texts. The pipeline is loaded already and has a batch size of 1, 8, 32 or
64. The time of `shared.predict` includes loading the model, reading the file and writing the predictions, but not the
imports. The rates are texts per second of CPU time on one thread, because other programs on the machine change them
less. Writes predictions.json and predictions.md into the output folder.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, rounds

BATCH_SIZES = (1, 8, 32, 64)


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/predictions")
    parser.add_argument("--texts", type=int, default=2000, help="texts that each contestant predicts")
    arguments = parser.parse_args()
    os.environ |= {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        made = encoder_and_texts.prepare(Path(folder), seed=0, texts=arguments.texts)
        run = contestants(Path(folder), made)
        names = ["ours", *(f"pipeline, {size}" for size in BATCH_SIZES)]
        rows = rounds.take_turns(names, arguments.rounds, run)
    for row in rows:
        row["rate"] = row["texts"] / row["cpu_seconds"]
    compared = {f"ours / {name}": rounds.compare(rows, "rate", "ours", name) for name in names[1:]}
    fastest = [
        max(row["rate"] for row in rows if row["round"] == round_ and row["contestant"] != "ours")
        for round_ in range(arguments.rounds)
    ]
    ours = [row["rate"] for row in rows if row["contestant"] == "ours"]
    ratios = [mine / other for mine, other in zip(ours, fastest, strict=True)]
    compared["ours / the fastest pipeline"] = rounds.summary(ratios)
    rounds.save(arguments, "predictions", 1, rows, compared)


def contestants(folder: Path, made: dict[str, Any]) -> Any:
    """A function that predicts all texts with a contestant and returns its rate."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import pipeline

    from shared import predict

    texts = pq.read_table(made["files"]["train_file"])["text"]
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    listed = texts.to_pylist()
    classify = pipeline("text-classification", model=made["encoder"], top_k=None)

    def run(name: str, round_: int) -> dict[str, float]:
        cache = folder / "cache"
        os.environ["ACCELERATE_RECIPES_CACHE"] = str(cache)  # without the tokens of an earlier round
        output = folder / f"{round_}.parquet"
        started, started_cpu = time.perf_counter(), time.process_time()
        if name == "ours":
            words = [made["encoder"], str(folder / "texts.parquet"), "--predictions_file", str(output)]
            predict.predict(predict.parse([*words, "--max_length", str(encoder_and_texts.MAX_LENGTH)]))
        else:
            size = int(name.rpartition(" ")[2])
            for _ in classify(listed, batch_size=size, truncation=True, max_length=encoder_and_texts.MAX_LENGTH):
                pass
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        shutil.rmtree(cache, ignore_errors=True)
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "texts": len(listed)}

    return run


if __name__ == "__main__":
    main()
