"""Measure what pretraining gains: recipes/nlp.py from a model that recipes/mlm.py pretrained, and from random weights.

    python benchmarks/pretraining.py --output_dir out/pretraining

The two fine-tunings differ in --model_name_or_path only. The pretraining sees no text of the validation files, because
both recipes hold out the same source files. Writes pretraining.json and pretraining.md into the output folder. Started
again, it resumes.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.launching import flag_words
from benchmarks.harness.rounds import command, machine

WAYS = ("from scratch", "pretrained")
LEARNING_RATE = 1e-3  # of both ways; the recipe's default for a pretrained model is lower


def train(recipe: Any, flags: dict[str, object]) -> dict[str, float]:
    """Run a recipe in this process, or load a finished run; its results."""
    from shared.config import options

    return recipe.main(options.parse(recipe.Config, flag_words(flags)))


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    found = report["pretrained"]
    lines = [
        f"Pretraining: {report['settings']['pretrain_steps']} steps; held-out loss {found['eval_loss']:.3f}, accuracy "
        f"{found['eval_accuracy']:.3f}, pseudo-perplexity {found['eval_perplexity']:.1f}.",
        "",
        "| fine-tuning steps | from scratch, mean (each seed) | pretrained, mean (each seed) |",
        "|---:|---|---|",
    ]
    for steps in report["settings"]["steps"]:
        cells = []
        for way in WAYS:
            each = [row["eval_accuracy"] for row in report["rows"] if (row["steps"], row["way"]) == (steps, way)]
            cells.append(f"{statistics.mean(each):.3f} ({', '.join(f'{value:.3f}' for value in each)})" if each else "")
        lines.append(f"| {steps} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/pretraining"))
    parser.add_argument("--pretrain_steps", type=int, default=520)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    from recipes import mlm, nlp

    folder = arguments.output_dir.resolve()
    pretraining = {"max_train_steps": arguments.pretrain_steps, "output_dir": folder / "mlm"}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    about = {"machine": machine(1), "command": command(), "settings": settings}
    report: dict[str, Any] = about | {"pretrained": train(mlm, pretraining), "rows": []}
    for seed in arguments.seeds:
        for steps in arguments.steps:
            for way in WAYS:
                flags = {"max_train_steps": steps, "eval_steps": steps, "checkpointing_steps": "no", "seed": seed}
                flags |= {"learning_rate": LEARNING_RATE}
                flags["output_dir"] = folder / f"{way.replace(' ', '_')}-{steps}-{seed}"
                if way == "pretrained":
                    flags["model_name_or_path"] = folder / "mlm/model"
                report["rows"].append({"way": way, "steps": steps, "seed": seed, **train(nlp, flags)})
                (folder / "pretraining.json").write_text(json.dumps(report, indent=1) + "\n")
                (folder / "pretraining.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
