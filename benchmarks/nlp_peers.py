"""Measure recipes/nlp.py beside a bare DDP loop, Accelerate, Fabric and Trainer: tokens per second, evaluation time.

    python benchmarks/nlp_peers.py --processes 2 --rounds 5 --output_dir out/nlp_peers

Every contestant trains the same BERT (4 layers x 256) on the same texts with the same number of samples per update. The
contestants take turns; each turn is a new launch, pinned to as many cores as there are processes. Only real tokens
count. The start and the first update are left out. Writes nlp_cpu.json and nlp_cpu.md into the output folder.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.encoder_and_texts import MAX_LENGTH, SIZES, prepare
from benchmarks.harness.launching import HARNESS, ROOT, flag_words, launch, logged_steps

LABELS = {
    "ours": "recipes/nlp.py",
    "bare": "bare DDP, random batches padded to their longest",
    "group_by_length": 'Trainer, `train_sampling_strategy="group_by_length"`',
    "bare_tuned": "bare DDP, grouped by length",
    "accelerate": "Accelerate's documented loop, as shipped",
    "accelerate_tuned": "Accelerate's documented loop, fused AdamW, grouped by length",
    "fabric": "Lightning Fabric, as shipped",
    "fabric_tuned": "Lightning Fabric, fused AdamW, grouped by length",
    "trainer": "Trainer, as shipped",
    "batch_rebalance": 'Trainer, `train_sampling_strategy="batch_rebalance"`',
}
WARMUP = 1  # updates that are left out at the start


def race(
    arguments: argparse.Namespace, prepared: dict[str, Any], folder: Path, name: str, round_: int
) -> dict[str, Any]:
    """Launch one contestant; its row of one round."""
    log, result = folder / f"{name}-{round_}.log", folder / f"{name}-{round_}.json"
    if name == "ours":
        output = folder / f"ours-{round_}"
        memory = launch(arguments.processes, log, *recipe_command(arguments, prepared, output, round_))
        row = recipe_row(arguments, prepared, output, round_)
    else:
        job = job_for(arguments, prepared, "nlp") | {"contestant": name, "seed": round_, "result": str(result)}
        job["output_dir"] = str(folder / f"{name}-{round_}")
        if name in ("bare", "accelerate", "fabric", "trainer"):  # an update in random order takes twice as long
            job["steps"] = max(1, arguments.steps // 2) + WARMUP
        result.with_suffix(".job").write_text(json.dumps(job))
        memory = launch(arguments.processes, log, HARNESS / "contestants.py", result.with_suffix(".job"))
        row = json.loads(result.read_text())
    return {"contestant": name, "round": round_, **row, "peak_rss_mib": memory}


def job_for(arguments: argparse.Namespace, prepared: dict[str, Any], benchmark: str) -> dict[str, Any]:
    """The settings that all contestants of a benchmark share."""
    return {
        "encoder": prepared["encoder"],
        "train_file": prepared["files"]["train_file"],
        "validation_file": prepared["files"][benchmark],
        "max_length": MAX_LENGTH,
        "max_tokens": arguments.max_tokens_per_micro_batch,
        "rows": arguments.rows,
        "accumulation": arguments.global_batch_size // arguments.rows // arguments.processes,
        "steps": arguments.steps + WARMUP,
        "warmup": WARMUP,
        "bf16": arguments.mixed_precision == "bf16",
        "workers": arguments.workers,
    }


def recipe_command(arguments: argparse.Namespace, prepared: dict[str, Any], output: Path, seed: int) -> list[object]:
    """The recipe with its flags, as a user starts it."""
    flags = {
        "model_name_or_path": prepared["encoder"],
        "train_file": prepared["files"]["train_file"],
        "validation_file": prepared["files"]["nlp"],
        "max_length": MAX_LENGTH,
        "global_batch_size": arguments.global_batch_size,
        "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
        "max_train_steps": arguments.steps + WARMUP,
        "learning_rate": 1e-4,
        "mixed_precision": arguments.mixed_precision,
        "logging_steps": 1,
        "eval_steps": arguments.steps + WARMUP,
        "checkpointing_steps": "no",
        "seed": seed,
        "expect_processes": arguments.processes,
        "output_dir": output,
    }
    return [ROOT / "recipes/nlp.py", *flag_words(flags)]


def recipe_row(arguments: argparse.Namespace, prepared: dict[str, Any], output: Path, seed: int) -> dict[str, float]:
    """The recipe's rates, from its metrics.jsonl; its padding, from the plan, which depends on the config only."""
    from shared.plan.batches import Plan

    lengths, steps = prepared["lengths"], range(WARMUP, arguments.steps + WARMUP)
    timed = logged_steps(output, WARMUP)
    assert len(timed) == len(steps)
    seconds = sum(arguments.global_batch_size / line["samples_per_second"] for line in timed)
    plan = Plan(
        lengths=lengths,
        seed=seed,
        global_batch_size=arguments.global_batch_size,
        max_steps=arguments.steps + WARMUP,
        max_tokens=arguments.max_tokens_per_micro_batch,
        num_processes=arguments.processes,
    )
    cut = [m.samples for step in steps for m in plan.cut(step)]
    real = sum(int(lengths[samples].sum()) for samples in cut)
    padded = sum(len(samples) * int(lengths[samples].max()) for samples in cut)
    logged = sum(line["tokens_per_second"] * arguments.global_batch_size / line["samples_per_second"] for line in timed)
    assert abs(logged / real - 1) < 1e-6, "the recipe's count of tokens differs from its plan's"
    samples = arguments.global_batch_size * len(steps)
    return {
        "tokens_per_second": real / seconds,
        "samples_per_second": samples / seconds,
        "padding_share": 1 - real / padded,
        "tokens_per_sample": real / samples,
        "seconds": seconds,
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The recipe's tokens per second divided by each other contestant's: median, interval, extremes, every round."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["contestant"] for row in rows if row["contestant"] != "ours"):
        if each := rounds.by_round(rows, "ours", name, "tokens_per_second"):
            found[name] = rounds.summary(each) | {"min": min(each), "max": max(each)}
    return found


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    at, settings, text = report["machine"], report["settings"], report["text"]
    precision = "bf16" if settings["mixed_precision"] == "bf16" else "fp32"
    lines = [
        f"{at['cpu']}, {at['cores_used']} of {at['cores']} cores, one thread per process; torch "
        f"{at['versions']['torch']}, transformers {at['versions']['transformers']}, accelerate "
        f"{at['versions']['accelerate']}; {at['date'][:10]}.",
        "",
        f"{settings['processes']} processes, {precision}, BERT {SIZES['num_hidden_layers']} x {SIZES['hidden_size']} "
        f"({report['parameters'] / 1e6:.1f} M parameters), {settings['global_batch_size']} samples per "
        f"update; {text['texts']:,} docstrings of {text['mean']:.0f} tokens on average (quartiles "
        f"{text['quartiles'][0]:.0f}, {text['quartiles'][1]:.0f}, {text['quartiles'][2]:.0f}), cut at {MAX_LENGTH} "
        f"({text['cut_share']:.0%} of them). The recipe: micro-batches of at most "
        f"{settings['max_tokens_per_micro_batch']} tokens; the others: {settings['rows']} rows x "
        f"{settings['global_batch_size'] // settings['rows'] // settings['processes']} accumulation steps. "
        f"{settings['rounds']} rounds in turns; medians.",
        "",
    ]
    if report["rows"]:
        lines += [
            "| contestant | real tokens/s | samples/s | padding | peak memory per process | recipe against it |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name in dict.fromkeys(row["contestant"] for row in report["rows"]):
            mine = [row for row in report["rows"] if row["contestant"] == name]
            middle = {k: statistics.median(row[k] for row in mine) for k in mine[0] if k not in ("contestant", "round")}
            ratio = report["ratios"].get(name)
            faster = f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else ""
            lines.append(
                f"| {LABELS[name]} | {middle['tokens_per_second']:,.0f} | {middle['samples_per_second']:.1f} | "
                f"{middle['padding_share']:.1%} | {middle['peak_rss_mib']:,.0f} MiB | {faster} |"
            )
        lines.append("")
    if evaluated := report["evaluation"]:
        middle = {k: statistics.median(turn[k] for turn in evaluated["turns"]) for k in evaluated["turns"][0]}
        lines += [
            f"Evaluation of {evaluated['texts']} texts: {middle['ours']:.2f} s, in random order with the training "
            f"batch {middle['random_order']:.2f} s: {middle['ratio']:.2f} of the time "
            f"({min(t['ratio'] for t in evaluated['turns']):.2f}-{max(t['ratio'] for t in evaluated['turns']):.2f}); "
            f"Trainer.evaluate {middle['trainer']:.2f} s: {middle['of_trainer']:.2f} of the time "
            f"({min(t['of_trainer'] for t in evaluated['turns']):.2f}-"
            f"{max(t['of_trainer'] for t in evaluated['turns']):.2f}).",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed updates per launch, after one of warm-up")
    parser.add_argument("--output_dir", type=Path, default=Path("out/nlp_peers"))
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of each tuned contestant's process")
    parser.add_argument("--benchmarks", nargs="+", choices=["nlp", "eval"], default=["nlp", "eval"])
    parser.add_argument("--contestants", nargs="+", choices=list(LABELS), default=list(LABELS)[:-1])
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch of the other contestants")
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=1024, help="the recipe's budget")
    parser.add_argument("--texts", type=int, help="train on that many texts only; default: all")
    parser.add_argument("--evaluation_texts", type=int, default=600, help='texts of the benchmark "eval"')
    arguments = parser.parse_args()
    if arguments.global_batch_size % (arguments.rows * arguments.processes):
        parser.error("--global_batch_size must be a multiple of --rows x --processes")
    folder = rounds.make_runs_folder(arguments.output_dir)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    prepared = prepare(folder, 0, arguments.texts, arguments.evaluation_texts)
    lengths = prepared["lengths"]
    report: dict[str, Any] = {
        "machine": rounds.machine(arguments.processes),
        "command": rounds.command(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "parameters": prepared["parameters"],
        "text": {
            "texts": len(lengths),
            "mean": float(lengths.mean()),
            "quartiles": [float(sorted(lengths)[int(q * (len(lengths) - 1))]) for q in (0.25, 0.5, 0.75)],
            "cut_share": float((lengths == MAX_LENGTH).mean()),
        },
        "rows": [],
        "ratios": {},
        "evaluation": None,
    }

    if "eval" in arguments.benchmarks:
        result = folder / "evaluation.json"
        job = job_for(arguments, prepared, "eval") | {"contestant": "evaluation", "result": str(result)}
        job |= {"steps": arguments.rounds, "output_dir": str(folder / "evaluation")}
        result.with_suffix(".job").write_text(json.dumps(job))
        script = (HARNESS / "contestants.py", result.with_suffix(".job"))
        launch(arguments.processes, folder / "evaluation.log", *script)
        report["evaluation"] = json.loads(result.read_text())
    for round_, name in rounds.turns(arguments.contestants, arguments.rounds if "nlp" in arguments.benchmarks else 0):
        row = race(arguments, prepared, folder, name, round_)
        report["rows"].append(row)
        rate = f"{row['tokens_per_second']:8,.0f} tokens/s, padding {row['padding_share']:.1%}"
        print(f"round {round_} {name:16} {rate}", flush=True)
    report["ratios"] = ratios(report["rows"])
    (arguments.output_dir / "nlp_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.output_dir / "nlp_cpu.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
