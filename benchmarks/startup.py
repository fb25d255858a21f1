"""From the launch to the end of the first optimizer step: the recipe beside transformers' Trainer, all caches warm.

    python benchmarks/startup.py --processes 2 --rounds 5 --output_dir out/startup

Both are started by torchrun, read the same Parquet files and the same BERT (4 layers x 256), and take a first step of
the same number of samples. Trainer's script is what a user writes by the documentation: datasets, whose `map` keeps its
tokens, a metric of evaluate, and a Trainer. Both run under `first_step.py`, which notes the time at the end of the
first step and ends the process. The first launch of each fills the caches and does not count. Leaves startup.json
and startup.md in the output folder.
"""

import os
import time
from pathlib import Path
from typing import Any

import peers
import rounds

HERE = Path(__file__).parent


def main() -> None:
    parser = rounds.parser(__doc__, "out/startup")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    parser.add_argument("--contestants", nargs="+", choices=["ours", "trainer"], default=["ours", "trainer"])
    arguments = parser.parse_args()
    folder = rounds.fresh_folder(arguments)
    prepared = peers.prepare(folder, 0, arguments.texts)
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # of this benchmark alone
    train, validation = prepared["files"]["train_file"], prepared["files"]["nlp"]
    recipe = [
        *(HERE.parent / "recipes/nlp.py", "--model_name_or_path", prepared["encoder"], "--train_file", train),
        *("--validation_file", validation, "--max_length", peers.MAX_LENGTH, "--global_batch_size", 32),
        *("--max_tokens_per_micro_batch", 2048, "--mixed_precision", "no"),
    ]
    scripts: dict[str, list[Any]] = {
        "ours": recipe,
        "trainer": [HERE / "trainer_script.py", prepared["encoder"], train, validation, peers.MAX_LENGTH],
    }

    def run(name: str, round_: int) -> rounds.Row:
        place = folder / f"{name}-{round_}"
        place.mkdir(exist_ok=True)
        output = ["--output_dir", place / "run"]
        noted = place / "first_step"
        script = [HERE / "first_step.py", noted, *scripts[name], *output]
        started = time.time()
        memory = peers.launch(arguments.processes, place / "log", *script)
        return {"seconds": float(noted.read_text()) - started, "peak_rss_mib": memory}

    for name in arguments.contestants:
        run(name, -1)
    rows = rounds.take_turns(arguments.contestants, arguments.rounds, run)
    found = {}
    if len(arguments.contestants) == 2:
        found = {"launch to first step, ours / trainer": rounds.compare(rows, "seconds", "ours", "trainer")}
    rounds.save(arguments, "startup", arguments.processes, rows, found)


if __name__ == "__main__":
    main()
