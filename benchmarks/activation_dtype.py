"""Compare the loss of masked language modeling in float32, under bf16 autocast and with bf16 activations.

    python benchmarks/activation_dtype.py --output_dir out/activation_dtype

Each precision trains `recipes/mlm.py` on the docstrings, with the recipe's default model, from the same seeds. Flags of
the recipe may follow, such as --hidden_size 256. Writes activation_dtype.json and activation_dtype.md into the output
folder, after each run. Started again, it resumes.

On a CPU, matrix products of bf16 tensors are computed in float32 and rounded to bf16, as a GPU does (see
harness/bf16_products.py). The rates in bf16 then say nothing about a GPU.
"""

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.launching import flag_words
from benchmarks.harness.rounds import command, machine

PRECISIONS: dict[str, dict[str, object]] = {
    "float32": {"mixed_precision": "no"},
    "bf16 autocast": {"mixed_precision": "bf16"},
    "bf16 activations": {"mixed_precision": "no", "activation_dtype": "bf16"},
}
LAST = 100  # steps whose training losses are averaged


def train(flags: dict[str, object], more: list[str]) -> dict[str, float]:
    """Run the recipe in a process of its own, or load a finished run; its figures."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:  # Accelerate keeps the precision of a process
        return pool.apply(train_here, (flags, more))


def train_here(flags: dict[str, object], more: list[str]) -> dict[str, float]:
    """Run the recipe in this process: scores, mean training loss of the last steps, seconds and tokens per second."""
    import torch

    from benchmarks.harness.bf16_products import ProductsInFloat32
    from recipes import mlm
    from shared.config import options

    with nullcontext() if torch.cuda.is_available() else ProductsInFloat32():
        scores = mlm.main(options.parse(mlm.Config, [*flag_words(flags), *more]))
    lines = [json.loads(line) for line in (Path(str(flags["output_dir"])) / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    last = [line["loss"] for line in logged if line["step"] > logged[-1]["step"] - LAST]
    rate = statistics.median(line["tokens_per_second"] for line in logged)
    return scores | {"train_loss": statistics.mean(last), "tokens_per_second": rate}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    steps, figures = report["settings"]["steps"], ("train_loss", "eval_loss", "eval_accuracy", "tokens_per_second")
    lines = [
        f"Masked language modeling, {steps} steps; mean over the seeds (each seed). Training loss: mean of the last "
        f"{LAST} steps.",
        "",
        "| precision | training loss | held-out loss | held-out accuracy | tokens/s |",
        "|---|---|---|---|---:|",
    ]
    for name in PRECISIONS:
        rows = [row for row in report["rows"] if row["precision"] == name]
        cells = []
        for figure in figures if rows else ():
            each = [row[figure] for row in rows]
            shown = "{:,.0f}" if figure == "tokens_per_second" else "{:.4f}"
            cells.append(f"{shown.format(statistics.mean(each))} ({', '.join(map(shown.format, each))})")
        lines.append(f"| {name} | {' | '.join(cells or ['not measured'] * len(figures))} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/activation_dtype"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    arguments, more = parser.parse_known_args()
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"steps": arguments.steps, "seeds": arguments.seeds, "flags": more}
    report: dict[str, Any] = {"machine": machine(1), "command": command(), "settings": settings, "rows": []}
    for seed in arguments.seeds:
        for name in arguments.precisions:
            flags = {"max_train_steps": arguments.steps, "eval_steps": arguments.steps, "seed": seed}
            flags |= {"save_total_limit": 1, **PRECISIONS[name]}
            flags["output_dir"] = folder / f"{name.replace(' ', '_')}-{seed}"
            report["rows"].append({"precision": name, "seed": seed, **train(flags, more)})
            (folder / "activation_dtype.json").write_text(json.dumps(report, indent=1) + "\n")
            (folder / "activation_dtype.md").write_text(table(report))
            print(report["rows"][-1], flush=True)
    print(table(report))


if __name__ == "__main__":
    main()
