"""Measure accuracy and loss of small and large batches: five-fold cross-validation on the digits, with several seeds.

    python benchmarks/large_batches.py --results out/large_batches.json

Every image is held out once per seed and setting. Runs that are in the results file are not repeated. The script prints
the table and draws docs/images/large_batches.png; with --report_only it does nothing else.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shared.config import options  # noqa: E402
from shared.images.images import prepare  # noqa: E402
from shared.images.sources import digits  # noqa: E402
from shared.monitoring import curves, tracking  # noqa: E402
from shared.plan.splits import by_class  # noqa: E402

FOLDS = 5
# (name, global batch, flags); --learning_rate is for a batch of 256.
SETTINGS = [
    ("32, scaled", 32, []),
    ("256", 256, []),
    ("1,024, scaled", 1024, []),
    ("1,024, neither", 1024, ["--scale_learning_rate", "none", "--warmup_ratio", 0]),
]
COMMON = [
    *("--image_size", 16, "--embedding_size", 16, "--hidden_sizes", 32, 64, "--learning_rate", 0.2),
    *("--warmup_ratio", 0.2, "--checkpointing_steps", "no", "--eval_steps", 10**6, "--logging_steps", 10**6),
]
Run = dict[str, Any]


def main() -> None:
    """Make the runs that are missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file with a line of JSON per run")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 ... (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the data (default: %(default)s)")
    parser.add_argument("--report_only", action="store_true", help="make no runs")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/large_batches.png", help="PNG file")
    given = parser.parse_args()
    runs = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    if not given.report_only:
        tracking.draw_curves = lambda *_: None  # nobody looks at 100 pictures
        given.results.parent.mkdir(parents=True, exist_ok=True)
        have = {(run["setting"], run["seed"], run["fold"]) for run in runs}
        for seed in range(given.seeds):
            for fold in range(FOLDS):
                for name, batch, flags in SETTINGS:
                    if (name, seed, fold) not in have:
                        found = {"setting": name, "seed": seed, "fold": fold} | train(seed, fold, batch, flags, given)
                        runs.append(found)
                        with given.results.open("a") as file:
                            file.write(json.dumps(found) + "\n")
    table = summarize(runs)
    for line in table:
        print(line)
    draw(runs, given.picture)


def train(seed: int, fold: int, batch: int, flags: list[Any], given: argparse.Namespace) -> Run:
    """Train the recipe on four fifths of the digits and evaluate on the other one, number `fold`."""
    spec = importlib.util.spec_from_file_location("image_classification", ROOT / "recipes/image_classification.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["image_classification"] = recipe
    spec.loader.exec_module(recipe)
    load_data = recipe.load_data

    def load_fold(config: Any) -> Any:
        train, _, augmentation = load_data(config)
        whole = digits()
        held_out = np.zeros(len(whole), bool)
        held_out[by_class(whole.targets, 0)[fold::FOLDS]] = True  # the same folds for every seed
        squares = train.square, augmentation.geometry.evaluation_square
        parts = zip((~held_out, held_out), squares, strict=True)
        return *(prepare(whole.take(chosen), config, square) for chosen, square in parts), augmentation

    recipe.load_data = load_fold
    with tempfile.TemporaryDirectory() as folder:
        words = [*COMMON, "--seed", seed, "--global_batch_size", batch, "--num_train_epochs", given.epochs, *flags]
        config = options.parse(recipe.Config, [*map(str, words), "--output_dir", folder])
        results = recipe.main(config)
        losses = [line["loss"] for line in tracking.read_metrics(Path(folder) / "metrics.jsonl") if "loss" in line]
    return {"batch": batch, "epochs": given.epochs, "training_loss": losses[-1]} | results


def by_setting(runs: list[Run], key: str) -> dict[str, np.ndarray]:
    """For each setting the means over the folds of each seed, float64 [seeds]."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run["setting"]][run["seed"]].append(run[key])
    return {
        setting: np.array([np.mean(folds) for folds in seeds.values() if len(folds) == FOLDS])
        for setting, seeds in found.items()
    }


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean over seeds."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def summarize(runs: list[Run]) -> list[str]:
    """The table of docs/large_batches.md."""
    accuracy, loss = by_setting(runs, "eval_accuracy"), by_setting(runs, "eval_loss")
    lines = ["| global batch | accuracy, % | standard error | loss | standard error |", "|---|---|---|---|---|"]
    for setting, values in accuracy.items():
        lines.append(
            f"| {setting} | {100 * values.mean():.2f} | {100 * standard_error(values):.2f} | "
            f"{loss[setting].mean():.4f} | {standard_error(loss[setting]):.4f} |"
        )
    return lines


def draw(runs: list[Run], picture: Path) -> None:
    """Draw accuracy and loss of each setting: a dot per seed, and the mean with its standard error."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(curves.STYLE):
        figure = Figure(figsize=(7.2, 2.8), dpi=150, layout="constrained")
        for place, (key, title, scale) in enumerate(
            (("eval_accuracy", "Accuracy, %", 100), ("eval_loss", "Loss on held-out images", 1)), start=1
        ):
            axes = figure.add_subplot(1, 2, place)
            for x, (setting, values) in enumerate(by_setting(runs, key).items()):
                color = curves.COLORS[x]
                axes.plot([x - 0.15] * len(values), scale * values, "o", color=color, alpha=0.4, label=setting)
                axes.errorbar(x + 0.1, scale * values.mean(), scale * standard_error(values), fmt="s", color=color)
            axes.set_title(title)
            axes.set_xticks(range(len(SETTINGS)), [name.replace(", ", "\n", 1) for name, *_ in SETTINGS])
            axes.set_xlabel("global batch and scaling rule")
        figure.savefig(picture)


if __name__ == "__main__":
    main()
