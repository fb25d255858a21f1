"""Measure training on one GPU, beside the rates of its matrix products and copies; `make gpu` runs this script.

    python benchmarks/gpu.py --seconds 330

Each benchmark of harness/gpu_benchmarks.py trains through a recipe's own `main` in its own process, for about 20 s. A
process whose time is over is ended, and the lines of its metrics.jsonl count. After each benchmark the script writes
benchmarks/results/gpu_NAME.json and .md, so that an interrupted run keeps its results. Without a GPU everything has toy
size: that tests the script, and the figures mean nothing.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.gpu_benchmarks import BENCHMARKS, Benchmark
from benchmarks.harness.launching import HARNESS, ROOT
from shared.monitoring.flops import measure_peak

DATASHEET = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # dense bf16 operations per second, SXM
TIME_LIMIT = 75  # seconds for a benchmark, with its start and its compiling
# Benchmarks whose rates are divided: one, other, minimum of the ratio, target.
PAIRS = (("fine_tuning", "fine_tuning_trainer", 2, 3), ("fine_tuning_compiled", "fine_tuning_trainer", 2, 3))
PAIRS += (("bert_base", "bert_base_eager", None, None), ("bert_base_real", "bert_base_padded", None, None))
PAIRS += (("bert_base_deterministic", "bert_base_eager", None, None), ("resnet50", "resnet50_eager", None, None))
PAIRS += (("vit", "vit_eager", None, None), ("modernbert_base", "modernbert_base_eager", None, None))
PAIRS += (("resnet50_cache", "resnet50", 0.95, None), ("vit_cache", "vit", 0.95, None))


def ceilings() -> dict[str, float]:
    """The fastest matrix product in bf16 and the fastest copies: operations and bytes per second."""
    if not torch.cuda.is_available():
        return {"product": measure_peak(torch.device("cpu"), "bf16")}
    device = torch.device("cuda")
    found = {"product": max(measure_peak(device, "bf16") for _ in range(3))}
    on_device = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    copies = {"device": (on_device.clone(), on_device, 2), "to_host": (pinned, on_device[: 1 << 28], 1)}
    copies["to_device"] = (on_device[: 1 << 28], pinned, 1)
    for name, (target, source, passes) in copies.items():
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        found[name] = passes * source.nbytes / best
    return found


def race(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a benchmark for at most `seconds`, then end its process with all that it started; its row."""
    log = folder.with_suffix(".log")
    command = [sys.executable, HARNESS / "run_gpu_benchmark.py", name, folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    row = figures(BENCHMARKS[name], folder) | {"benchmark": name, "seconds": time.perf_counter() - started}
    if code:
        row["problem"] = "cut off" if code == -signal.SIGKILL else log.read_text().strip().splitlines()[-1][:200]
    return row


def figures(benchmark: Benchmark, folder: Path) -> dict[str, Any]:
    """The figures of a run: means over its timed steps, weighted by their time."""
    file = folder / "run/metrics.jsonl"
    whole = [line for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    lines = [json.loads(line) for line in whole]
    toy = not torch.cuda.is_available()
    timed = [line for line in lines if "loss" in line and line["step"] > (1 if toy else benchmark.warmup)]
    row: dict[str, Any] = {"data": benchmark.data, "unit": benchmark.unit, "lines": len(timed)}
    if not timed:
        return row
    seconds = sum(line["step_seconds"] for line in timed)

    def mean(key: str) -> float:
        return sum(line.get(key, 0.0) * line["step_seconds"] for line in timed) / seconds

    row["rate"] = mean("tokens_per_second" if benchmark.unit == "tokens" else "samples_per_second")
    row |= {"step_seconds": seconds / len(timed), "slowest_line": max(line["step_seconds"] for line in timed)}
    row |= {"data_wait": mean("data_wait"), "peak_memory_bytes": max(line["peak_memory_bytes"] for line in timed)}
    row |= json.loads((folder / "facts.json").read_text())
    stalls = [line["checkpoint_seconds"] for line in timed if line.get("checkpoint_seconds")]
    if stalls and "checkpointing_steps" in benchmark.flags:
        newest = max((folder / "run/checkpoints").glob("step_*"), default=None)
        saved = sum(part.stat().st_size for part in newest.iterdir()) if newest else 0
        row |= {"checkpoint_stall": min(stalls), "checkpoint_bytes": saved}  # the first save also allocates its memory
    if (folder / "waits.json").exists():
        waits = json.loads((folder / "waits.json").read_text())
        steps = waits["steps"][1:]  # compiling, in the first step, may wait for the device
        row |= {"host_waits_per_step": sum(steps) / max(len(steps), 1), "host_waits_where": waits["where"]}
    return row


def compare(report: dict[str, Any]) -> None:
    """Add to each row its share of the matrix product and its MFU, and to the report its ratios."""
    gpu, product = report["machine"]["device"], report["ceilings"]["product"]
    sheet = next((peak for name, peak in DATASHEET.items() if name in gpu), None)
    for row in report["rows"]:
        if done := row.get("rate", 0.0) * row.get("operations", 0.0):
            row["share_of_product"] = done / product
            row["mfu"] = done / sheet if sheet else None
    rates = {row["benchmark"]: row.get("rate") for row in report["rows"]}
    report["ratios"] = [
        {"benchmarks": [one, other], "ratio": rates[one] / rates[other], "minimum": minimum, "target": target}
        for one, other, minimum, target in PAIRS
        if rates.get(one) and rates.get(other)
    ]


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    at, top = report["machine"], report["ceilings"]
    versions = ", ".join(f"{name} {number}" for name, number in at["versions"].items())
    copies = "".join(
        f", copy {name.replace('_', ' ')} {top[name] / 1e9:,.0f} GB/s" for name in top if name != "product"
    )
    lines = [
        f"{at['device']}; {versions}; {at['date'][:10]}. `{at['command']}`",
        "",
        f"Measured ceilings: matrix product in bf16 {top['product'] / 1e12:,.1f} TFLOP/s{copies}.",
        "",
        "| benchmark | data | per second | minimum | target | MFU | of the product | host waits per step | data wait | "
        "peak memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        benchmark = BENCHMARKS[row["benchmark"]]
        limits = [verdict(row.get("rate"), value) for value in (benchmark.minimum, benchmark.target)]
        rate = f"{row['rate']:,.0f} {row['unit']}" if "rate" in row else row.get("problem", "no timed step")
        cells = [
            row["benchmark"],
            row["data"],
            rate,
            *limits,
            percent(row.get("mfu")),
            percent(row.get("share_of_product")),
        ]
        waits = row.get("host_waits_per_step")
        cells += ["" if waits is None else f"{waits:.2f}", percent(row.get("data_wait"))]
        cells += [f"{row['peak_memory_bytes'] / 2**30:.1f} GiB" if "peak_memory_bytes" in row else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| ratio of rates | | minimum | target |", "|---|---:|---:|---:|"]
    for pair in report["ratios"]:
        judged = [verdict(pair["ratio"], pair[name]) for name in ("minimum", "target")]
        lines.append(f"| {' / '.join(pair['benchmarks'])} | {pair['ratio']:.2f} | {' | '.join(judged)} |")
    for row in report["rows"]:
        if "checkpoint_stall" in row:
            stall, size = row["checkpoint_stall"], row["checkpoint_bytes"]
            floor = f", a copy to the host takes {size / top['to_host'] * 1e3:.1f} ms" if "to_host" in top else ""
            lines += ["", f"A call that saves {size / 1e9:.2f} GB takes {stall * 1e3:.1f} ms{floor}."]
    return "\n".join([*lines, ""])


def verdict(value: float | None, limit: float | None) -> str:
    """The minimum or target, and whether `value` reaches it."""
    if limit is None:
        return ""
    return f"{limit:,.4g}" if value is None else f"{limit:,g} {'✓' if value >= limit else '✗'}"


def percent(share: float | None) -> str:
    """A share in percent; nothing for None."""
    return "" if share is None else f"{share:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330, help="limit for all benchmarks; the rest is left out")
    parser.add_argument("--benchmarks", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--output_dir", type=Path, help="default: benchmarks/results; without a GPU out/gpu")
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU, toy sizes: not measured"
    name = re.sub(r"\W+", "_", device.lower().removeprefix("nvidia ")) if on_gpu else "toy"
    output = arguments.output_dir or (ROOT / "benchmarks/results" if on_gpu else ROOT / "out/gpu")
    output.mkdir(parents=True, exist_ok=True)
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "accelerate")}
    machine = {"device": device, "versions": versions, "command": "python " + " ".join(sys.argv)}
    machine["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine, "ceilings": ceilings(), "rows": [], "left_out": []}
    torch.cuda.empty_cache()  # the benchmarks' processes need the memory
    work = ROOT / "out/gpu_benchmarks"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for benchmark in arguments.benchmarks:
        if (left := end - time.perf_counter()) < TIME_LIMIT / 3:
            report["left_out"].append(benchmark)
            continue
        report["rows"].append(race(benchmark, work / benchmark, min(TIME_LIMIT, left)))
        compare(report)
        (output / f"gpu_{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (output / f"gpu_{name}.md").write_text(table(report))
        row = report["rows"][-1]
        print(f"{benchmark:26} {row.get('rate', 0):12,.1f} {row['unit']}/s {row.get('problem', '')}", flush=True)
        shutil.rmtree(work / benchmark, ignore_errors=True)  # the log is beside the folder and stays
    print(table(report) if report["rows"] else "no time for any benchmark", flush=True)
    if report["left_out"]:
        print(f"left out, no time: {', '.join(report['left_out'])}", flush=True)


if __name__ == "__main__":
    main()
