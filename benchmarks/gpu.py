"""Measure training on one GPU, in parts of less than nine minutes; `make gpu` runs them all.

    python benchmarks/gpu.py distributed tests text images variants image-variants peers
    python benchmarks/gpu.py --table

Each benchmark of harness/gpu_benchmarks.py trains through a recipe's own `main` in its own process, for about 20 s. A
process whose time is over is ended, and the lines of its metrics.jsonl count. `saves`, `predictions` and
`predictions_float32` are scripts of their own, in benchmarks/. The parts "distributed" and "tests" run the tests that
need a GPU. A benchmark whose packages are not installed says so and is left out. Each part adds an
entry to the GPU's file, benchmarks/results/gpu/NAME.json, and the entry is written after each benchmark, so that an
interrupted run keeps its results. Without a GPU everything has toy size: that tests the script, and the figures mean
nothing. --table writes the tables of docs/performance.md and docs/faster_runs.md from these files.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.gpu_benchmarks import (
    BENCHMARKS,
    IMAGE_VARIANTS,
    LIMITS,
    MAIN,
    MEMORY_LIMITS,
    PAIRS,
    PARTS,
    PEERS,
    PREDICTIONS,
    SCRIPTS,
    VARIANTS,
    Benchmark,
)
from benchmarks.harness.launching import HARNESS, ROOT, between_marks, python_path
from shared.extras.flops import measure_peak

RESULTS = ROOT / "benchmarks/results/gpu"
START, END = "<!-- benchmarks/gpu.py --table writes these tables -->", "<!-- end of the GPU tables -->"
DATASHEET = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # dense bf16 operations per second, SXM
GPU_TESTS = {"distributed": "tests/recipes/test_gpu_distributed.py", "tests": "tests/recipes/test_gpu.py"}
LAST_LINES = 8  # of the log of a benchmark that failed
Row = dict[str, Any]
Entry = dict[str, Any]


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


def run_limited(command: list[Any], log: Path, seconds: float) -> int:
    """Run a command for at most `seconds`, then end it with all that it started; its exit code.

    It is interrupted first, as by Ctrl-C, so that pytest writes its report, and killed 10 s later.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": python_path()}
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            if "pytest" in command:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return code


def race(name: str, folder: Path, seconds: float) -> Row:
    """Run a benchmark for at most `seconds`, then end its process with all that it started; its row."""
    log = folder.with_suffix(".log")
    started = time.perf_counter()
    command = [sys.executable, HARNESS / "run_gpu_benchmark.py", name, folder]
    if script := SCRIPTS.get(BENCHMARKS[name].recipe):
        command = [sys.executable, ROOT / "benchmarks" / script, *script_flags(BENCHMARKS[name])]
        command += ["--output_dir", folder]
    code = run_limited(command, log, seconds)
    row = figures(BENCHMARKS[name], folder) | {"benchmark": name, "seconds": time.perf_counter() - started}
    return row | (problem_in(log, code == -signal.SIGKILL, seconds) if code else {})


def problem_in(log: Path, cut_off: bool, seconds: float) -> Row:
    """Why a benchmark or the tests failed, and the last lines of their log."""
    lines = log.read_text(errors="replace").replace(f"{ROOT}/", "").strip().splitlines()  # no path of a machine
    last = [line[:200] for line in lines[-LAST_LINES:]]
    why = f"cut off after {seconds:.0f} s" if cut_off else (last or ["no output"])[-1]
    return {"problem": why, "last_lines": last}


def script_flags(benchmark: Benchmark) -> list[str]:
    """The flags of a benchmark that is a script; without a GPU, those at toy size."""
    flags = benchmark.flags | ({} if torch.cuda.is_available() else benchmark.toy)
    return [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]


def figures(benchmark: Benchmark, folder: Path) -> Row:
    """The figures of a run: means over its timed steps, weighted by their time."""
    row: Row = {"data": benchmark.data, "unit": benchmark.unit}
    for name in ("passes", "kernels", "saves"):
        if (file := folder / f"{name}.json").exists():
            found = json.loads(file.read_text())
            row |= found if isinstance(found, dict) else {name: found}
    if (file := folder / "predictions.json").exists():
        row |= prediction_rates(json.loads(file.read_text())["rows"])
    file = folder / "run/metrics.jsonl"
    whole = [line for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    lines = [json.loads(line) for line in whole]
    toy = not torch.cuda.is_available()
    timed = [line for line in lines if "loss" in line and line["step"] > (1 if toy else benchmark.warmup)]
    row["lines"] = len(timed)
    if not timed:
        return row
    seconds = sum(line["step_seconds"] for line in timed)

    def mean(key: str) -> float:
        return sum(line.get(key, 0.0) * line["step_seconds"] for line in timed) / seconds

    row["rate"] = mean("tokens_per_second" if benchmark.unit == "tokens" else "samples_per_second")
    row |= {"step_seconds": seconds / len(timed), "slowest_line": max(line["step_seconds"] for line in timed)}
    row |= {"data_wait": mean("data_wait"), "padding": mean("padding")}
    row |= {"peak_memory_bytes": max(line["peak_memory_bytes"] for line in timed)}
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
        row |= {"compiled_graphs": waits["compiled_graphs"]}
    return row


def prediction_rates(rows: list[Row]) -> Row:
    """Rates of `shared.predict`, and rate and settings of the fastest pipeline: medians over the rounds.

    `rows`: those that benchmarks/predictions.py writes.
    """

    def median(name: str, figure: str = "rate") -> float:
        return statistics.median(row[figure] for row in rows if row["contestant"] == name)

    of_pipelines = {row["contestant"]: row for row in rows if row["contestant"] != "ours"}
    fastest = max(of_pipelines, key=median)
    found = {"rate": median("ours"), "rate_without_load": median("ours", "rate_without_load")}
    found |= {"pipeline_rate": median(fastest)}
    return found | {f"pipeline_{name}": of_pipelines[fastest][name] for name in ("batch_size", "workers")}


def run_tests(part: str, folder: Path, seconds: float) -> Row:
    """Run the tests that need a GPU; how many passed, and which failed."""
    log, report = folder / "tests.log", folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", GPU_TESTS[part], f"--junitxml={report}"]
    command += ["-n", str(min(8, len(os.sched_getaffinity(0))))]  # processes, which share the GPU
    started = time.perf_counter()
    code = run_limited(command, log, seconds)
    row: Row = {"benchmark": part, "seconds": time.perf_counter() - started}
    if report.exists():
        cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
        kinds = {name: {child.tag for child in case} for name, case in cases.items()}
        row["failed"] = [name for name, kind in kinds.items() if kind & {"failure", "error"}]
        row["skipped"] = sum("skipped" in kind for kind in kinds.values())
        row["passed"] = len(cases) - row["skipped"] - len(row["failed"])
        taken = {name: float(case.get("time", 0)) for name, case in cases.items()}
        row["slowest"] = dict(sorted(taken.items(), key=lambda pair: -pair[1])[:5])
    return row | (problem_in(log, row["seconds"] > seconds, seconds) if code else {})


def machine() -> dict[str, Any]:
    """The GPU, the versions, and the number of cores."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, toy sizes: not measured"
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "accelerate")}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    return {"device": gpu, "cores": len(os.sched_getaffinity(0)), "versions": versions}


def file_name(device: str) -> str:
    """The file of a GPU: `h100_80gb_hbm3.json`."""
    return re.sub(r"\W+", "_", device.lower().removeprefix("nvidia ")).strip("_") + ".json"


def run_part(part: str, names: list[str], seconds: float, file: Path) -> bool:
    """Run a part, and add its entry to `file`; whether all of it gave figures."""
    end = time.perf_counter() + seconds
    at = machine()
    on_gpu = torch.cuda.is_available()
    entries = json.loads(file.read_text()) if file.exists() else []
    entry: Entry = {"part": part, "machine": at, "command": "python " + " ".join(sys.argv)}
    entry |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    entry |= {"ceilings": {} if part in GPU_TESTS else ceilings(), "rows": [], "left_out": []}
    if on_gpu:
        torch.cuda.empty_cache()  # the benchmarks' processes need the memory
    work = (ROOT / "out/gpu_benchmarks" if on_gpu else file.parent / "work") / part  # a test keeps the logs of a GPU
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    complete = True
    for name in [part] if part in GPU_TESTS else names:
        limit = seconds if part in GPU_TESTS else BENCHMARKS[name].seconds
        if (left := end - time.perf_counter()) < min(limit, seconds) / 3:
            entry["left_out"].append(name)
            continue
        needs = () if part in GPU_TESTS else BENCHMARKS[name].needs
        missing = [package for package in needs if importlib.util.find_spec(package) is None]
        if missing:
            row = {"benchmark": name, "problem": f"not installed: {', '.join(missing)}"}
        else:
            row = run_tests(part, work, left) if part in GPU_TESTS else race(name, work / name, min(limit, left))
        entry["rows"].append(row)
        partly = file.with_suffix(".partly")
        partly.write_text(json.dumps([*entries, entry], indent=1) + "\n")
        partly.replace(file)
        print(said(row), flush=True)
        if "problem" in row and not missing:
            complete = False
            print(f"{name}: the last lines of {work / name}.log:", *row["last_lines"], sep="\n  ", flush=True)
        shutil.rmtree(work / name, ignore_errors=True)  # the log is beside the folder and stays
    if entry["left_out"]:
        print(f"left out, no time: {', '.join(entry['left_out'])}", flush=True)
    return complete


def said(row: Row) -> str:
    """A row as a line for the terminal."""
    if row["benchmark"] in GPU_TESTS:
        failed = f", failed: {', '.join(row['failed'])}" if row.get("failed") else ""
        count = f"{row.get('passed', 0)} passed, {row.get('skipped', 0)} skipped{failed}"
        return f"{row['benchmark']} {count} {row.get('problem', '')}"
    figure = f"{row['rate']:12,.1f} {row['unit']}/s" if "rate" in row else f"{len(row.get('passes', ()))} passes"
    if "save_extra_ms" in row:
        figure = f"{row['save_extra_ms']:12,.1f} ms for a save"
    return f"{row['benchmark']:34} {figure} {row.get('problem', '')}"


def newest(entries: list[Entry], benchmark: str, key: str = "rate") -> tuple[Row, Entry] | None:
    """The newest row of a benchmark that has a figure, with its entry."""
    found = [(row, entry) for entry in entries for row in entry["rows"] if row["benchmark"] == benchmark and key in row]
    return max(found, key=lambda pair: pair[1]["date"], default=None)


def problem(entries: list[Entry], benchmark: str) -> str:
    """Why a benchmark has no figure; nothing if it did not run."""
    found = newest(entries, benchmark, "problem")
    return found[0]["problem"] if found else ""


def tables(entries: list[Entry]) -> str:
    """The rates of a GPU and their ratios as Markdown, with the commands of all its entries."""
    measured = [entry for entry in entries if entry["rows"]]
    device = measured[-1]["machine"]["device"]
    parts = [f"### {device}", *main_table(measured, device), *ratio_table(measured)]
    commands = dict.fromkeys(f"- {entry['date'][:10]}: `{entry['command']}`" for entry in measured)
    return "\n\n".join([*parts, "\n".join([facts(measured), *commands])])


def technique_tables(entries: list[Entry]) -> str:
    """What single techniques change on a GPU, as Markdown; empty for a GPU on which none was measured."""
    measured = [entry for entry in entries if entry["rows"]]
    if not any(row["benchmark"] in VARIANTS | IMAGE_VARIANTS for entry in measured for row in entry["rows"]):
        return ""
    parts = [f"### {measured[-1]['machine']['device']}", *variant_table(measured)]
    return "\n\n".join(filter(None, [*parts, pass_table(measured)]))


def main_table(entries: list[Entry], device: str) -> list[str]:
    """Rate, MFU, waits and memory of each benchmark; then those that were not measured."""
    head = [
        "| benchmark | per second | minimum | target | MFU | of the product | host waits per step | data wait | "
        "peak memory | date |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    peak = next((value for name, value in DATASHEET.items() if name in device), None)
    lines, missing = [], []
    for name, benchmark in MAIN.items():
        limits = (benchmark.minimum, benchmark.target)
        if not (found := newest(entries, name)):
            missing.append(f"`{name}`{remarks(problem(entries, name), limits)}")
            continue
        row, entry = found
        done, product = row["rate"] * row.get("operations", 0), entry.get("ceilings", {}).get("product")
        waits = row.get("host_waits_per_step")
        cells = [
            f"{row['rate']:,.0f} {row['unit']}",
            *(verdict(row["rate"], limit) for limit in limits),
            percent(done / peak if done and peak else None),
            percent(done / product if done and product else None),
            "" if waits is None else f"{waits:.2f}",
            percent(row.get("data_wait")),
            gib(row),
            entry["date"][:10],
        ]
        lines.append(f"| `{name}`: {benchmark.about} | {' | '.join(cells)} |")
    return rows_below(head, lines) + [f"Not measured: {', '.join(missing)}."] * bool(missing)


def ratio_table(entries: list[Entry]) -> list[str]:
    """Rates beside those of peers and of each other; then the pairs with a peer or a limit that have no ratio yet."""
    head = [
        "| rate of | | beside | | ratio | minimum | target | ratio of peak memory |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    lines, missing = [], []
    for one, other in [*((peer.beside, name) for name, peer in PEERS.items()), *PAIRS]:
        pair = [newest(entries, name) for name in (one, other)]
        limits = LIMITS.get((one, other), (None, None))
        if pair[0] and pair[1]:
            rates = [each[0]["rate"] for each in pair if each]
            ratio = rates[0] / rates[1]
            about = f"`{other}`: {BENCHMARKS[other].about}" if other in PEERS else f"`{other}`"
            cells = [f"`{one}`", f"{rates[0]:,.0f}", about, f"{rates[1]:,.0f}", f"{ratio:.2f}"]
            rows = [each[0] for each in pair if each]
            cells += [*(verdict(ratio, limit) for limit in limits), memory_ratio(one, other, *rows)]
            lines.append(f"| {' | '.join(cells)} |")
        elif other in PEERS or any(limits):
            missing.append(f"`{one}` beside `{other}`{remarks('', limits)}")
    return rows_below(head, lines) + [f"Not measured: {'; '.join(missing)}."] * bool(missing)


def variant_table(entries: list[Entry]) -> list[str]:
    """Each technique switched on or off, beside the benchmark that it changes; then why others have no figure."""
    head = [
        "| variant | of | per second | ratio | kernels per step | first to last kernel of a step | peak memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines, problems = [], []
    for name, variant in (VARIANTS | IMAGE_VARIANTS).items():
        if not variant.beside:
            continue
        found, other = newest(entries, name), newest(entries, variant.beside)
        kernels = newest(entries, name, "busy_ms")
        if not (row := (found or kernels or ({},))[0]):
            problems.append(problem(entries, name) and f"{variant.about}, `{variant.beside}`: {problem(entries, name)}")
            continue
        ratio = f"{row['rate'] / other[0]['rate']:.2f}" if found and other else "-"
        times = [f"{row[key]:.1f} ms" if row.get(key) else "" for key in ("busy_ms", "span_ms")]
        rate = f"{row['rate']:,.0f} {row['unit']}" if found else "not measured"
        lines.append(f"| {' | '.join([variant.about, f'`{variant.beside}`', rate, ratio, *times, gib(row)])} |")
    reasons = "; ".join(filter(None, problems))
    count = f"{len(problems)} variants in [gpu_benchmarks.py](../benchmarks/harness/gpu_benchmarks.py)"
    return rows_below(head, lines) + [f"Not measured: {count}{f' ({reasons})' * bool(reasons)}."] * bool(problems)


def rows_below(head: list[str], lines: list[str]) -> list[str]:
    """A table, if it has rows."""
    return ["\n".join([*head, *lines])] if lines else []


def pass_table(entries: list[Entry]) -> str:
    """Forward and backward pass without data, optimizer and loop; empty where it was not measured."""
    if not (found := newest(entries, "bert_base_passes", "passes")):
        return ""
    lines = [
        "| forward and backward pass of BERT-base, 64 x 512 | time | tokens/s | peak memory |",
        "|---|---:|---:|---:|",
    ]
    for each in found[0]["passes"]:
        time_ = f"{each['ms']:.1f} ms" if "ms" in each else each["problem"].replace("|", "/")
        rate = f"{each['rate']:,.0f}" if "rate" in each else "-"
        lines.append(f"| {each['name']} | {time_} | {rate} | {gib(each)} |")
    return "\n".join(lines)


def facts(entries: list[Entry]) -> str:
    """Ceilings, versions, the pause for a save, predictions and the tests, as sentences."""
    top = [entry["ceilings"] for entry in entries if entry["ceilings"].get("product")]
    said = []
    if top:
        rates = sorted(each["product"] / 1e12 for each in top)
        copies = [
            f"copy {name.replace('_', ' ')} {max(each[name] for each in top if name in each) / 1e9:,.0f} GB/s"
            for name in ("device", "to_host", "to_device")
            if any(name in each for each in top)
        ]
        products = f"matrix product in bf16 {rates[0]:,.0f} to {rates[-1]:,.0f} TFLOP/s"
        said.append(f"Measured ceilings: {', '.join([products, *copies])}.")
    if found := newest(entries, "bert_base_checkpoints", "checkpoint_stall"):
        row, entry = found
        floor = entry["ceilings"].get("to_host")
        copy = f"; a copy of it to the host takes {row['checkpoint_bytes'] / floor * 1e3:.0f} ms" if floor else ""
        size = row["checkpoint_bytes"] / 1e9
        stall = row["checkpoint_stall"] * 1e3
        said.append(f"A save of {size:.2f} GB every 8 steps pauses the loop for {stall:,.0f} ms{copy}.")
    if found := newest(entries, "saves", "save_extra_ms"):
        row, _ = found
        said.append(
            f"A save of {row['save_bytes'] / 1e9:.2f} GB that is due when the last one is done pauses the loop for "
            f"{row['save_stall_ms']:,.1f} ms, and the next step ends {row['save_extra_ms']:,.1f} ms later; with a copy "
            f"of the same bytes into pinned memory, {row['copy_extra_ms']:,.1f} ms later. It is on disk after "
            f"{row['save_on_disk_ms']:,.0f} ms: a save that is due earlier waits for the rest of that time."
        )
    for name, predictions in PREDICTIONS.items():
        if found := newest(entries, name, "pipeline_rate"):
            row, _ = found
            ratio, minimum = row["rate"] / row["pipeline_rate"], LIMITS[name, "pipeline"][0]
            said.append(
                f"{predictions.about}: `python -m shared.predict` predicts {row['rate']:,.0f} texts/s with the load of "
                f"the model and {row['rate_without_load']:,.0f} without it. The fastest `pipeline`, which is loaded "
                f"already, predicts {row['pipeline_rate']:,.0f}, with a batch size of {row['pipeline_batch_size']} and "
                f"{row['pipeline_workers']} loader workers. The ratio is {ratio:.2f} with the load and "
                f"{row['rate_without_load'] / row['pipeline_rate']:.2f} without it (minimum "
                f"{verdict(ratio, minimum)})."
            )
    for row, entry in filter(None, (newest(entries, part, "passed") for part in GPU_TESTS)):
        failed = f", {len(row['failed'])} failed ({', '.join(row['failed'])})" if row["failed"] else ""
        count = f"{row['passed']} passed, {row['skipped']} skipped{failed}"
        what = "GPU tests of FSDP and of several processes" if row["benchmark"] == "distributed" else "GPU tests"
        said.append(f"{what} on {entry['date'][:10]}: {count}, in {row['seconds']:,.0f} s.")
    versions = {", ".join(f"{name} {v}" for name, v in entry["machine"]["versions"].items()) for entry in entries}
    said.append(f"Versions: {'; '.join(sorted(versions))}.")
    return "\n".join(f"- {sentence}" for sentence in said)


def memory_ratio(one: str, other: str, row: Row, other_row: Row) -> str:
    """The ratio of two peaks of memory with its minimum and target, where both rows have one."""
    if not (row.get("peak_memory_bytes") and other_row.get("peak_memory_bytes")):
        return ""
    ratio = row["peak_memory_bytes"] / other_row["peak_memory_bytes"]
    named = zip(("minimum", "target"), MEMORY_LIMITS.get((one, other), ()), strict=False)
    limits = [f"{name} {limit:g} {'✓' if ratio <= limit else '✗'}" for name, limit in named]
    return f"{ratio:.2f}" + f" ({', '.join(limits)})" * bool(limits)


def remarks(why: str, limits: tuple[float | None, float | None]) -> str:
    """` (no memory, minimum 2, target 3)`; nothing where there is none of these."""
    named = zip(("minimum", "target"), limits, strict=True)
    known = [why] * bool(why) + [f"{name} {verdict(None, limit)}" for name, limit in named if limit]
    return f" ({', '.join(known)})" if known else ""


def verdict(value: float | None, limit: float | None) -> str:
    """The minimum or target, and whether `value` reaches it."""
    if limit is None:
        return ""
    number = f"{limit:,.0f}" if limit >= 100 else f"{limit:g}"
    return number if value is None else f"{number} {'✓' if value >= limit else '✗'}"


def percent(share: float | None) -> str:
    """A share in percent; nothing for None."""
    return "" if share is None else f"{share:.1%}"


def gib(row: Row) -> str:
    """The peak memory of a row; nothing where it has none."""
    return f"{row['peak_memory_bytes'] / 2**30:.1f} GiB" if row.get("peak_memory_bytes") else ""


# The pages with tables of GPUs.
PAGES = {ROOT / "docs/performance.md": tables, ROOT / "docs/faster_runs.md": technique_tables}


def write_tables() -> None:
    """Write the tables of all GPUs into their pages, between the marks."""
    gpus = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    for page, make in PAGES.items():
        text = "\n\n".join(filter(None, map(make, gpus)))
        page.write_text(between_marks(page.read_text(), START, END, text))
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=500, help="limit for each part; what is left is left out")
    parser.add_argument("--benchmarks", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--output_dir", type=Path, help="default: benchmarks/results/gpu; without a GPU out/gpu")
    parser.add_argument("--table", action="store_true", help="write the tables of the documentation and do no more")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    if arguments.table:
        write_tables()
        return
    output = arguments.output_dir or (RESULTS if torch.cuda.is_available() else ROOT / "out/gpu")
    file = output / file_name(machine()["device"])
    failed = []
    for part in arguments.parts or PARTS:
        names = [name for name in arguments.benchmarks if BENCHMARKS[name].part == part]
        if not run_part(part, names, arguments.seconds, file):
            failed.append(part)
    if failed:
        print(f"not all of {', '.join(failed)} gave figures: see above and {file}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
