"""Predict training on 8 to 4,096 H100s from figures of one, and compare the model with published scaling.

    python benchmarks/predict_gpus.py

Nothing here is measured on more than one GPU. The computation is that of one H100 (results/gpu/h100_80gb_hbm3.json),
the speeds of links are published (harness/published.py), and harness/scaling_model.py has the model. Each GPU computes
what the one GPU computed, a machine has 8 GPUs, and gradients are float32. The output has

- the step and its efficiency compared with one GPU, with the all-reduces overlapped as DDP does it, and not at all. The
  plan of a step (results/scale_processes.json) runs in the training process while the GPU computes. A step cannot be
  shorter than its plan, so "with the plan" counts the longer of the two.
- checkpoints: the copy to the host, which the next update waits for, and how often a save waits for the one before
- preparation: how long one machine tokenizes (results/tokenizing.json) what the run trains on
- published tables, predicted from their first row

Writes predict_gpus.json and predict_gpus.md into the output folder. It takes a second.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds, scaling_model
from benchmarks.harness.published import (
    A100_MEMORY,
    DGX_A100,
    ETHERNET,
    INFINIBAND,
    SOURCES,
    TABLES,
    Scaling,
)
from benchmarks.harness.scaling_model import Work

RESULTS = Path(__file__).parent / "results"
NEAR = 0.05  # of a published efficiency
MEMORY_SHARE = 0.87  # of a GPU's memory bandwidth that a copy reaches: 2.9 of 3.35 TB/s on the H100
BERT, BERT_EMBEDDINGS = 109_518_912, (30_528 + 512 + 2 + 2) * 768  # parameters, those of the embedding layer
RESNET = 25_557_032
RESNET_RATE = 3_929  # images per second, not compiled: docs/performance.md. The result file was not kept
SAVE_EVERY = 1_000  # steps
NETWORKS = {"InfiniBand, 8 x 400 Gbit/s per machine": INFINIBAND, "Ethernet, 100 Gbit/s per machine": ETHERNET}
WITH_PREPARATION = (8, 64, 512, 4096)  # GPUs
STEPS = (
    "*Efficiency* is compared with one GPU. *Without overlap*, the all-reduces begin after the backward pass. *With "
    "the plan*, a step takes at least as long as its plan, which was measured on one core of another machine."
)


@dataclass(frozen=True)
class Model:
    """What one GPU does in a step."""

    about: str
    unit: str
    units: float
    """Tokens or images per step."""
    samples: int
    """Per step."""
    kind: str
    """Of the samples: the plan of texts or of images, in scale.py."""
    work: Work
    state_bytes: float
    """Of a checkpoint."""


def entries() -> list[dict[str, Any]]:
    """What benchmarks/gpu.py measured on one H100."""
    return json.loads((RESULTS / "gpu/h100_80gb_hbm3.json").read_text())


def measured(benchmark: str, figure: str, otherwise: float | None = None) -> float:
    """The newest figure of a benchmark on one H100, or `otherwise` if there is none."""
    rows = [row for entry in entries() for row in entry["rows"] if row["benchmark"] == benchmark]
    found = [row[figure] for row in rows if figure in row] or [otherwise]
    assert found[-1] is not None, f"{benchmark} has no {figure}"
    return found[-1]


def ceiling(name: str) -> float:
    """Bytes per second that one H100 copies, median of the entries."""
    return statistics.median(entry["ceilings"][name] for entry in entries() if name in entry.get("ceilings", {}))


def bert_base(micro_batches: int) -> Model:
    """BERT-base with so many micro-batches of 64 x 512 tokens per GPU and step."""
    step, update = measured("bert_base", "step_seconds"), 1.7e-3  # its optimizer's kernels: docs/faster_runs.md
    tokens = step * measured("bert_base", "rate")
    computation = micro_batches * (step - update) + update
    about = f"BERT-base, masked LM, compiled, {64 * micro_batches} x 512 tokens per GPU and step"
    about += f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
    work = Work(computation, 4 * BERT, 4 * BERT_EMBEDDINGS, micro_batches, update)
    return Model(about, "tokens", micro_batches * tokens, 64 * micro_batches, "texts", work, 12 * BERT)


def resnet50(images: int = 384) -> Model:
    """ResNet-50, without the input of images."""
    update = 20 * RESNET / ceiling("device")  # SGD reads and writes 20 bytes per parameter
    work = Work(images / measured("resnet50_eager", "rate", RESNET_RATE), 4 * RESNET, update=update)
    about = f"ResNet-50, not compiled, {images} images per GPU and step"
    return Model(about, "images", images, images, "images", work, 8 * RESNET)


def plan_seconds(processes: int, model: Model) -> float:
    """Seconds on a processor for the plan of a step in each process, between the measured numbers of processes."""
    found = json.loads((RESULTS / "scale_processes.json").read_text())["comparisons"].values()
    mine = [row for row in found if row.get("kind") == model.kind]
    mine = [row for row in mine if row["global_batch_size"] == model.samples * row["processes"]]
    points = sorted((row["processes"], row["median"] / 1000) for row in mine)
    return float(np.interp(processes, *zip(*points, strict=True)))


def predictions() -> list[dict[str, Any]]:
    """A row per model, network and number of GPUs."""
    models = (bert_base(1), bert_base(4), resnet50())
    return [predicted(count, model, name) for model in models for name in NETWORKS for count in scaling_model.COUNTS]


def predicted(count: int, model: Model, network: str) -> dict[str, Any]:
    """The row of one number of GPUs."""
    row = scaling_model.predict(count, model.work, NETWORKS[network])
    hidden_nothing = scaling_model.exposed_seconds(count, 0.0, model.work, NETWORKS[network])
    plan = plan_seconds(count, model)
    with_plan = max(row["step_seconds"], plan)
    return {
        "model": model.about,
        "unit": model.unit,
        "network": network,
        **row,
        "efficiency_without_overlap": model.work.computation / (model.work.computation + hidden_nothing),
        "plan_seconds": plan,
        "efficiency_with_plan": model.work.computation / with_plan,
        "units_per_second": count * model.units / with_plan,
    }


def checkpoints() -> list[dict[str, Any]]:
    """What saves cost each model; the same for any number of GPUs, because the first machine writes."""
    stall, size = (
        measured("bert_base_checkpoints", "checkpoint_stall"),
        measured("bert_base_checkpoints", "checkpoint_bytes"),
    )
    between = 8 * measured("bert_base_checkpoints", "step_seconds")  # that benchmark saves every 8 steps
    write_rate = size / (stall + between)
    rows = []
    for model in (bert_base(1), resnet50()):
        step = model.work.computation
        copy = model.state_bytes / ceiling("to_host")
        rows.append(
            {
                "model": model.about,
                "bytes": model.state_bytes,
                "copy_seconds": copy,
                "copy_seconds_shared": copy / INFINIBAND.ranks_per_machine,
                "share_of_time": copy / (copy + SAVE_EVERY * step),
                "write_seconds": model.state_bytes / write_rate,
                "steps_until_written": model.state_bytes / write_rate / step,
            }
        )
    return rows


def preparation() -> dict[str, Any]:
    """Tokens per second that one machine tokenizes, and the time of this compared with an epoch of BERT-base."""
    report = json.loads((RESULTS / "tokenizing.json").read_text())
    rate = report["tokens"] / statistics.median(row["ours"] for row in report["rows"])
    fast = {
        count: predicted(count, bert_base(1), next(iter(NETWORKS)))["units_per_second"] for count in WITH_PREPARATION
    }
    return {
        "tokens_per_second": rate,
        "cores": report["machine"]["cores_used"],
        "times_an_epoch": {count: trained / rate for count, trained in fast.items()},
    }


def compare(table: Scaling) -> list[dict[str, Any]]:
    """Predict each row of a published table from its first one."""
    first, *others = table.runs
    update = table.update_bytes / (MEMORY_SHARE * A100_MEMORY)
    base_step = table.samples * first.micro_batches * first.gpus / first.rate
    late = 0.0 if table.overlap else table.gradient_bytes
    base = Work(base_step, table.gradient_bytes, late, first.micro_batches, update)
    assert first.gpus == 1 or not table.overlap, "how much the first row hides is not known"
    exposed = scaling_model.exposed_seconds(first.gpus, 0.0, base, DGX_A100) if first.gpus > 1 else 0.0
    micro_batch = (base_step - update - exposed) / first.micro_batches
    rows = []
    for run in others:
        computation = run.micro_batches * micro_batch + update
        work = Work(computation, table.gradient_bytes, late, run.micro_batches, update)
        step = scaling_model.predict(run.gpus, work, DGX_A100)["step_seconds"]
        rate = table.samples * run.micro_batches * run.gpus / step
        of_base = first.gpus / (first.rate * run.gpus)
        row = {"about": table.about, "from": first.gpus, "to": run.gpus}
        row |= {"published": run.rate * of_base, "predicted": rate * of_base, "source": table.source}
        rows.append(row | {"error": row["predicted"] / row["published"] - 1, "difference": table.difference})
    return rows


def prediction_tables(rows: list[dict[str, Any]]) -> list[str]:
    """The predictions as Markdown, a table per model and network."""
    lines = []
    for model, unit, network in dict.fromkeys((row["model"], row["unit"], row["network"]) for row in rows):
        lines += [f"### {model}; {network}", ""]
        lines += [f"| GPUs | step | efficiency | without overlap | plan of a step | with the plan | {unit}/s |"]
        lines += ["|---:|---:|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {row['processes']:,} | {1000 * row['step_seconds']:.1f} ms | {row['efficiency']:.1%} | "
            f"{row['efficiency_without_overlap']:.1%} | {1000 * row['plan_seconds']:.1f} ms | "
            f"{row['efficiency_with_plan']:.1%} | {row['units_per_second']:,.0f} |"
            for row in rows
            if (row["model"], row["network"]) == (model, network)
        ]
        lines += [""]
    return lines


def comparison_table(rows: list[dict[str, Any]]) -> list[str]:
    """The comparison with published figures as Markdown."""
    lines = ["| run | GPUs | published | predicted | error |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {row['about']} | {row['from']} to {row['to']} | {row['published']:.1%} | {row['predicted']:.1%} | "
        f"{row['error']:+.1%}{'' if abs(row['error']) <= NEAR else ' ✗'} |"
        for row in rows
    ]
    far = dict.fromkeys((row["about"], row["difference"]) for row in rows if abs(row["error"]) > NEAR)
    return [*lines, "", *(f"✗ {about}: {why}." for about, why in far), ""]


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    prepared = report["preparation"]
    lines = [f"Predicted, not measured. `{report['command']}`", "", "## Steps", "", STEPS, ""]
    lines += prediction_tables(report["predictions"])
    share = f"share of the time, a save every {SAVE_EVERY:,} steps"
    lines += ["## Checkpoints", "", f"| | bytes | copy to the host | shared by 8 GPUs | {share} | written after |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['model']} | {row['bytes'] / 1e9:.2f} GB | {1000 * row['copy_seconds']:.1f} ms | "
        f"{1000 * row['copy_seconds_shared']:.1f} ms | {row['share_of_time']:.3%} | {row['write_seconds']:.1f} s, "
        f"{row['steps_until_written']:.0f} steps |"
        for row in report["checkpoints"]
    ]
    lines += ["", "## Preparation", ""]
    lines += [f"One machine tokenizes {prepared['tokens_per_second']:,.0f} tokens/s on {prepared['cores']} cores.", ""]
    lines += ["| GPUs | time to tokenize, in epochs of BERT-base over InfiniBand |", "|---:|---:|"]
    lines += [f"| {count:,} | {times:,.1f} |" for count, times in prepared["times_an_epoch"].items()]
    lines += ["", "## Published scaling", "", *comparison_table(report["published"])]
    lines += ["## Sources", "", "| figure | value | source |", "|---|---|---|"]
    lines += [f"| {figure} | {value} | {source} |" for figure, value, source in SOURCES]
    for source in dict.fromkeys(table.source for table in TABLES):
        about = "; ".join(table.about for table in TABLES if table.source == source)
        lines += [f"| scaling of {about} | | {source} |"]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/predict_gpus"))
    arguments = parser.parse_args()
    report = {
        "machine": rounds.machine(1),
        "command": rounds.command(),
        "predictions": predictions(),
        "checkpoints": checkpoints(),
        "preparation": preparation(),
        "published": [row for table in TABLES for row in compare(table)],
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "predict_gpus.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.output_dir / "predict_gpus.md").write_text(page(report))
    print(page(report))


if __name__ == "__main__":
    main()
