"""One GPU, lane by lane, against what it can do: `make gpu` runs this in under six minutes.

    python benchmarks/gpu.py --seconds 330

Each lane of benchmarks/gpu_lanes.py trains through a recipe's own `main` in a process of its own, for some 20 s, and is
ended when its time is over: what its metrics.jsonl holds by then counts. After each lane the JSON and the table are
written anew, into benchmarks/results/gpu_NAME.json and .md, so that a run that is cut off has lost nothing. Without a
GPU it runs at toy size, to see that it works, and its figures mean nothing.
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

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_lanes import LANES, Lane  # noqa: E402
from shared.monitoring.flops import measure_peak  # noqa: E402

DATASHEET = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # dense bf16 operations per second, SXM
BOX = 75  # seconds that a lane may take, its start and its compiling included
PAIRS = (("fine_tuning", "fine_tuning_trainer", 2, 3), ("fine_tuning_compiled", "fine_tuning_trainer", 2, 3))
PAIRS += (("bert_base", "bert_base_eager", None, None), ("bert_base_real", "bert_base_padded", None, None))
PAIRS += (("bert_base_deterministic", "bert_base_eager", None, None), ("resnet50", "resnet50_eager", None, None))
PAIRS += (("vit", "vit_eager", None, None), ("modernbert_base", "modernbert_base_eager", None, None))
PAIRS += (("resnet50_cache", "resnet50", 0.95, None), ("vit_cache", "vit", 0.95, None))


def ceilings() -> dict[str, float]:
    """What the device does in a matrix product in bf16, and in copies: operations and bytes per second."""
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
    """A lane's row: its process is ended, with all that it started, when its time is over."""
    log = folder.with_suffix(".log")
    command = [sys.executable, ROOT / "benchmarks/gpu_lanes.py", name, folder]
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
    row = figures(LANES[name], folder) | {"lane": name, "seconds": time.perf_counter() - started}
    if code:
        row["problem"] = "cut off" if code == -signal.SIGKILL else log.read_text().strip().splitlines()[-1][:200]
    return row


def figures(lane: Lane, folder: Path) -> dict[str, Any]:
    """What a lane's run left: rates of its timed steps, weighted by their time, and what else its lines say."""
    file = folder / "run/metrics.jsonl"
    whole = [line for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    lines = [json.loads(line) for line in whole]
    toy = not torch.cuda.is_available()
    timed = [line for line in lines if "loss" in line and line["step"] > (1 if toy else lane.warmup)]
    row: dict[str, Any] = {"data": lane.data, "unit": lane.unit, "lines": len(timed)}
    if not timed:
        return row
    seconds = sum(line["step_seconds"] for line in timed)

    def mean(key: str) -> float:
        return sum(line.get(key, 0.0) * line["step_seconds"] for line in timed) / seconds

    row["rate"] = mean("tokens_per_second" if lane.unit == "tokens" else "samples_per_second")
    row |= {"step_seconds": seconds / len(timed), "slowest_line": max(line["step_seconds"] for line in timed)}
    row |= {"data_wait": mean("data_wait"), "peak_memory_bytes": max(line["peak_memory_bytes"] for line in timed)}
    row |= json.loads((folder / "facts.json").read_text())
    stalls = [line["checkpoint_seconds"] for line in timed if line.get("checkpoint_seconds")]
    if stalls and "checkpointing_steps" in lane.flags:
        newest = max((folder / "run/checkpoints").glob("step_*"), default=None)
        saved = sum(part.stat().st_size for part in newest.iterdir()) if newest else 0
        row |= {"checkpoint_stall": min(stalls), "checkpoint_bytes": saved}  # the first one lays out its memory as well
    if (folder / "waits.json").exists():
        waits = json.loads((folder / "waits.json").read_text())
        steps = waits["steps"][1:]  # compiling, in the first one, may look at the device
        row |= {"host_waits_per_step": sum(steps) / max(len(steps), 1), "host_waits_where": waits["where"]}
    return row


def compare(report: dict[str, Any]) -> None:
    """Add to the rows what they are of the ceilings, and to the report its ratios."""
    gpu, product = report["machine"]["device"], report["ceilings"]["product"]
    sheet = next((peak for name, peak in DATASHEET.items() if name in gpu), None)
    for row in report["rows"]:
        if done := row.get("rate", 0.0) * row.get("operations", 0.0):
            row["share_of_product"] = done / product
            row["mfu"] = done / sheet if sheet else None
    rates = {row["lane"]: row.get("rate") for row in report["rows"]}
    report["ratios"] = [
        {"lanes": [one, other], "ratio": rates[one] / rates[other], "first_bar": bar, "goal": goal}
        for one, other, bar, goal in PAIRS
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
        "| lane | data | per second | first bar | goal | MFU | of the product | host waits per step | data wait | "
        "peak memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        lane = LANES[row["lane"]]
        bar, goal = (verdict(row.get("rate"), value) for value in (lane.first_bar, lane.goal))
        rate = f"{row['rate']:,.0f} {row['unit']}" if "rate" in row else row.get("problem", "no timed step")
        cells = [
            row["lane"],
            row["data"],
            rate,
            bar,
            goal,
            percent(row.get("mfu")),
            percent(row.get("share_of_product")),
        ]
        waits = row.get("host_waits_per_step")
        cells += ["" if waits is None else f"{waits:.2f}", percent(row.get("data_wait"))]
        cells += [f"{row['peak_memory_bytes'] / 2**30:.1f} GiB" if "peak_memory_bytes" in row else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| ratio of rates | | first bar | goal |", "|---|---:|---:|---:|"]
    for pair in report["ratios"]:
        judged = [verdict(pair["ratio"], pair[name]) for name in ("first_bar", "goal")]
        lines.append(f"| {' / '.join(pair['lanes'])} | {pair['ratio']:.2f} | {' | '.join(judged)} |")
    for row in report["rows"]:
        if "checkpoint_stall" in row:
            stall, size = row["checkpoint_stall"], row["checkpoint_bytes"]
            floor = f", a copy to the host takes {size / top['to_host'] * 1e3:.1f} ms" if "to_host" in top else ""
            lines += ["", f"A call that saves {size / 1e9:.2f} GB takes {stall * 1e3:.1f} ms{floor}."]
    return "\n".join([*lines, ""])


def verdict(value: float | None, bar: float | None) -> str:
    """A bar, and whether it was reached."""
    if bar is None:
        return ""
    return f"{bar:,.4g}" if value is None else f"{bar:,g} {'✓' if value >= bar else '✗'}"


def percent(share: float | None) -> str:
    """A share, or nothing."""
    return "" if share is None else f"{share:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330, help="for all lanes; those that do not fit are left out")
    parser.add_argument("--lanes", nargs="+", choices=list(LANES), default=list(LANES))
    parser.add_argument("--output_dir", type=Path, help="default: benchmarks/results, without a GPU out/gpu")
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
    torch.cuda.empty_cache()  # the lanes' processes need the memory
    work = ROOT / "out/gpu_lanes"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for lane in arguments.lanes:
        if (left := end - time.perf_counter()) < BOX / 3:
            report["left_out"].append(lane)
            continue
        report["rows"].append(race(lane, work / lane, min(BOX, left)))
        compare(report)
        (output / f"gpu_{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (output / f"gpu_{name}.md").write_text(table(report))
        row = report["rows"][-1]
        print(f"{lane:26} {row.get('rate', 0):12,.1f} {row['unit']}/s {row.get('problem', '')}", flush=True)
        shutil.rmtree(work / lane, ignore_errors=True)  # but its log stays
    print(table(report) if report["rows"] else "no time for any lane", flush=True)
    if report["left_out"]:
        print(f"left out, no time: {', '.join(report['left_out'])}", flush=True)


if __name__ == "__main__":
    main()
