"""Measure the model FLOP/s of recipes/nlp.py divided by the rate of a matrix product: its `mfu`, in fp32 and bf16.

    python benchmarks/utilisation.py --rounds 5 --output_dir out/utilisation

The recipe trains two encoders in one process of one thread: "small" is BERT 4 x 256, "wide" has two layers of
BERT-base's width, 768. Both read texts of at most 128 tokens. The figure is the median over the logged steps after the
first two. The recipe divides by the best product of square matrices of 512 or 768 rows. Writes utilisation.json and
utilisation.md into the output folder.
"""

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, launching, rounds

SIZES = {
    "small": encoder_and_texts.SIZES,
    "wide": {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072},
}
MAX_LENGTH, WARMUP = 128, 2


def main() -> None:
    parser = rounds.parser(__doc__, "out/utilisation")
    parser.add_argument("--steps", type=int, default=6, help=f"steps of each launch; the first {WARMUP} are left out")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=1024)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # otherwise the recipe would use all cores
    data = {size: encoder_and_texts.prepare(folder / size, sizes=SIZES[size]) for size in arguments.sizes}

    def run(name: str, round_: int) -> rounds.Row:
        size, precision = name.split()
        output = folder / f"{size}-{precision}-{round_}"
        flags = data[size] | {
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
        words = launching.flag_words(flags)
        launching.launch(1, folder / f"{output.name}.log", launching.ROOT / "recipes/nlp.py", *words)
        timed = launching.logged_steps(output, WARMUP)
        return {key: statistics.median(line[key] for line in timed) for key in ("mfu", "tokens_per_second", "padding")}

    names = [f"{size} {precision}" for size in arguments.sizes for precision in arguments.precisions]
    rows = rounds.take_turns(names, arguments.rounds, run)
    of = {name: [row["mfu"] for row in rows if row["contestant"] == name] for name in names}
    found = {f"mfu, {name}": rounds.summary(values) for name, values in of.items()}
    rounds.save(arguments, "utilisation", 1, rows, found)


if __name__ == "__main__":
    main()
