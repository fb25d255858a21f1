"""Measure the time from the launch to the end of the first optimizer step: recipes/nlp.py beside transformers' Trainer.

    python benchmarks/launch_to_first_step.py --processes 2 --rounds 5 --output_dir out/launch_to_first_step

torchrun starts both. They read the same Parquet files and the same BERT (4 layers x 256), and their first step has the
same number of samples. Trainer's script follows its documentation: datasets, whose `map` caches the tokens, a metric of
evaluate, and a Trainer. harness/run_to_first_step.py runs both, notes the time at the end of the first step and ends
the process. The first launch of each fills the caches and does not count. Writes launch_to_first_step.json and
launch_to_first_step.md into the output folder.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import encoder_and_texts, launching, rounds


def main() -> None:
    parser = rounds.parser(__doc__, "out/launch_to_first_step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    parser.add_argument("--contestants", nargs="+", choices=["ours", "trainer"], default=["ours", "trainer"])
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    prepared = encoder_and_texts.prepare(folder, 0, arguments.texts)
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # used by this benchmark only
    train, validation = prepared["files"]["train_file"], prepared["files"]["nlp"]
    recipe = [
        *(launching.ROOT / "recipes/nlp.py", "--model_name_or_path", prepared["encoder"], "--train_file", train),
        *("--validation_file", validation, "--max_length", encoder_and_texts.MAX_LENGTH, "--global_batch_size", 32),
        *("--max_tokens_per_micro_batch", 2048, "--mixed_precision", "no"),
    ]
    scripts: dict[str, list[Any]] = {
        "ours": recipe,
        "trainer": [
            launching.HARNESS / "trainer_script.py",
            prepared["encoder"],
            train,
            validation,
            encoder_and_texts.MAX_LENGTH,
        ],
    }

    def run(name: str, round_: int) -> rounds.Row:
        place = folder / f"{name}-{round_}"
        place.mkdir(exist_ok=True)
        output = ["--output_dir", place / "run"]
        noted = place / "first_step"
        script = [launching.HARNESS / "run_to_first_step.py", noted, *scripts[name], *output]
        started = time.time()
        memory = launching.launch(arguments.processes, place / "log", *script)
        return {"seconds": float(noted.read_text()) - started, "peak_rss_mib": memory}

    for name in arguments.contestants:
        run(name, -1)
    rows = rounds.take_turns(arguments.contestants, arguments.rounds, run)
    found = {}
    if len(arguments.contestants) == 2:
        found = {"launch to first step, ours / trainer": rounds.compare(rows, "seconds", "ours", "trainer")}
    rounds.save(arguments, "launch_to_first_step", arguments.processes, rows, found)


if __name__ == "__main__":
    main()
