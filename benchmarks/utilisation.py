"""Model FLOP/s of the recipe over the measured rate of a matrix product: its own `mfu`, in fp32 and bf16.

    python benchmarks/utilisation.py --rounds 5 --output_dir out/utilisation

Two encoders from nothing by recipes/nlp.py, one process of one thread: "small" is BERT 4 x 256, "wide" has two layers
of BERT-base's width, 768. Both read texts of at most 128 tokens. The figure is the median over the logged steps after
the first two. The peak that the recipe divides by is the best of products of 512 and 768 square matrices; the table
also has the rates of larger ones, so that one can see whether that is a fair peak. Leaves utilisation.json and
utilisation.md in the output folder.
"""

import json
import os
import statistics
import time
from pathlib import Path

import peers
import rounds

SIZES = {"small": (256, 4, 4, 1024), "wide": (768, 2, 12, 3072)}
MAX_LENGTH, SIDES, REPEATS, WARMUP = 128, (512, 768, 1024, 2048), 6, 2


def prepare(folder: Path, size: str) -> None:
    """Write an encoder of a size with its tokenizer, and the texts."""
    width, layers, heads, intermediate = SIZES[size]
    peers.SIZES = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }
    folder.mkdir()
    peers.prepare(folder, 0, None)


def peak_gflops(precision: str) -> dict[str, float]:
    """GFLOP/s of square matrix products by their side, the best of some each, in the precision of a run."""
    import torch

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found = {}
    for side in SIDES:
        a, b = (torch.rand(side, side).to(dtype) for _ in range(2))
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            a @ b
            best = min(best, time.perf_counter() - started)
        found[str(side)] = 2 * side**3 / best / 1e9
    return found


def main() -> None:
    parser = rounds.parser(__doc__, "out/utilisation")
    parser.add_argument("--steps", type=int, default=6, help=f"of each launch; the first {WARMUP} are left out")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=1024)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    arguments = parser.parse_args()
    folder = rounds.fresh_folder(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # or the recipe would use all cores
    for size in arguments.sizes:
        prepare(folder / size, size)

    def run(name: str, round_: int) -> rounds.Row:
        size, precision = name.split()
        output = folder / f"{size}-{precision}-{round_}"
        flags = {
            "model_name_or_path": folder / size / "encoder",
            "train_file": folder / size / "train.parquet",
            "validation_file": folder / size / "validation_nlp.parquet",
            "max_length": MAX_LENGTH,
            "global_batch_size": arguments.global_batch_size,
            "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
            "max_train_steps": arguments.steps,
            "mixed_precision": {"fp32": "no"}.get(precision, precision),
            "logging_steps": 1,
            "eval_steps": arguments.steps,
            "checkpointing_steps": "no",
            "seed": round_,
            "output_dir": output,
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        peers.launch(1, folder / f"{output.name}.log", peers.ROOT / "recipes/nlp.py", *words)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        timed = [line for line in lines if "loss" in line][WARMUP:]
        figures = ("mfu", "tokens_per_second", "padding")
        row = {key: statistics.median(line[key] for line in timed) for key in figures}
        return row | {f"peak_{side}": rate for side, rate in peak_gflops(precision).items()}

    names = [f"{size} {precision}" for size in arguments.sizes for precision in arguments.precisions]
    rows = rounds.take_turns(names, arguments.rounds, run)
    found = {
        f"mfu, {name}": rounds.summary([row["mfu"] for row in rows if row["contestant"] == name]) for name in names
    }
    rounds.save(arguments, "utilisation", 1, rows, found)


if __name__ == "__main__":
    main()
