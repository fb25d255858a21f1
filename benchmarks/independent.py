"""Two processes of one run beside two runs of one process each, at the same time: what training together costs.

    python benchmarks/independent.py --rounds 5 --output_dir out/independent

Both ways use the same cores, and each process does the same work per step: half of the global batch. The rates of the
independent runs are added up. Beside the rates stand padding, which sorting a larger global batch lessens, and
`communication`: the share of a step that a process waits for the other or for gradients. Leaves independent.json and
independent.md in the output folder.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import peers
import rounds

WARMUP = 2  # logged steps left out at the start


def figures(output: Path) -> rounds.Row:
    """Of the steps after the first ones, from metrics.jsonl: real tokens per second, shares of padding and waiting."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "loss" in line][WARMUP:]
    seconds = [line["step_seconds"] for line in timed]
    names = ("tokens_per_second", "padding", "communication")
    return {name: float(np.average([line[name] for line in timed], weights=seconds)) for name in names}


def main() -> None:
    parser = rounds.parser(__doc__, "out/independent")
    parser.add_argument("--steps", type=int, default=12, help=f"of each launch; the first {WARMUP} are left out")
    parser.add_argument("--global_batch_size", type=int, default=128, help="of the two processes together")
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048)
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    arguments = parser.parse_args()
    folder = rounds.fresh_folder(arguments)
    prepared = peers.prepare(folder, 0, arguments.texts)

    def words(output: Path, size: int, seed: int) -> list[str]:
        flags = {
            "model_name_or_path": prepared["encoder"],
            "train_file": prepared["files"]["train_file"],
            "validation_file": prepared["files"]["nlp"],
            "max_length": peers.MAX_LENGTH,
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
        return [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]

    def together(round_: int) -> rounds.Row:
        output = folder / f"together-{round_}"
        flags = words(output, arguments.global_batch_size, round_)
        peers.launch(2, folder / f"together-{round_}.log", peers.ROOT / "recipes/nlp.py", *flags)
        return figures(output)

    def apart(round_: int) -> rounds.Row:
        environment = peers.environment() | {"ACCELERATE_USE_CPU": "true"}
        outputs = [folder / f"apart-{round_}-{number}" for number in range(2)]
        started = []
        for output in outputs:
            flags = words(output, arguments.global_batch_size // 2, round_)
            command = [sys.executable, str(peers.ROOT / "recipes/nlp.py"), *flags]
            with output.with_suffix(".log").open("w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(codes), f"a run failed, see {folder}"
        one, other = map(figures, outputs)
        added = {"tokens_per_second": one["tokens_per_second"] + other["tokens_per_second"]}
        return {name: (one[name] + other[name]) / 2 for name in one} | added

    ways = {"together": together, "apart": apart}
    rows = rounds.take_turns(list(ways), arguments.rounds, lambda name, round_: ways[name](round_))
    found = {"together / apart": rounds.compare(rows, "tokens_per_second", "together", "apart")}
    rounds.save(arguments, "independent", 2, rows, found)


if __name__ == "__main__":
    main()
