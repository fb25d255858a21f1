"""Measure one run of two processes beside two independent runs of one process each: what training together costs.

    python benchmarks/independent_runs.py --rounds 5 --output_dir out/independent_runs

The independent runs go at the same time, and their rates are added up. Both ways use the same cores, and each process
does the same work per step: half of the global batch. The table also has the padding, which is smaller where a larger
global batch is sorted, and `communication`: the share of a step in which a process waits for the other one or for
gradients. Writes independent_runs.json and independent_runs.md into the output folder.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, launching, rounds

WARMUP = 2  # logged steps that are left out at the start


def figures(output: Path) -> rounds.Row:
    """Means over the steps after the first ones: real tokens per second, shares of padding and communication."""
    timed = launching.logged_steps(output, WARMUP)
    seconds = [line["step_seconds"] for line in timed]
    names = ("tokens_per_second", "padding", "communication")
    return {name: float(np.average([line[name] for line in timed], weights=seconds)) for name in names}


def main() -> None:
    parser = rounds.parser(__doc__, "out/independent_runs")
    parser.add_argument("--steps", type=int, default=12, help=f"steps of each launch; the first {WARMUP} are left out")
    parser.add_argument(
        "--global_batch_size", type=int, default=128, help="samples per step of both processes together"
    )
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048)
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    prepared = encoder_and_texts.prepare(folder, 0, arguments.texts)

    def words(output: Path, size: int, seed: int) -> list[str]:
        flags = {
            "model_name_or_path": prepared["encoder"],
            "train_file": prepared["files"]["train_file"],
            "validation_file": prepared["files"]["nlp"],
            "max_length": encoder_and_texts.MAX_LENGTH,
            "global_batch_size": size,
            "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
            "max_train_steps": arguments.steps,
            "mixed_precision": "no",
            "logging_steps": 1,
            "eval_steps": arguments.steps,
            "checkpointing_steps": "no",
            "seed": seed,
            "output_dir": output,
        }
        return launching.flag_words(flags)

    def together(round_: int) -> rounds.Row:
        output = folder / f"together-{round_}"
        flags = words(output, arguments.global_batch_size, round_)
        launching.launch(2, folder / f"together-{round_}.log", launching.ROOT / "recipes/nlp.py", *flags)
        return figures(output)

    def apart(round_: int) -> rounds.Row:
        environment = launching.environment() | {"ACCELERATE_USE_CPU": "true"}
        outputs = [folder / f"apart-{round_}-{number}" for number in range(2)]
        started = []
        for output in outputs:
            flags = words(output, arguments.global_batch_size // 2, round_)
            command = [sys.executable, str(launching.ROOT / "recipes/nlp.py"), *flags]
            with output.with_suffix(".log").open("w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"a run failed, see its log in {folder}")
        one, other = map(figures, outputs)
        added = {"tokens_per_second": one["tokens_per_second"] + other["tokens_per_second"]}
        return {name: (one[name] + other[name]) / 2 for name in one} | added

    ways = {"together": together, "apart": apart}
    rows = rounds.take_turns(list(ways), arguments.rounds, lambda name, round_: ways[name](round_))
    found = {"together / apart": rounds.compare(rows, "tokens_per_second", "together", "apart")}
    rounds.save(arguments, "independent_runs", 2, rows, found)


if __name__ == "__main__":
    main()
