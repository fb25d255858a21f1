"""Measure the plan on data sets of 100,000 to a billion samples, and for 4,096 processes.

    python benchmarks/scale.py --output_dir out/scale

The data sets are made up: a memory-mapped file of lengths, as data preparation leaves it, in the page cache. Each turn
starts two new processes, one at the first step and one in the middle of the first epoch. Each opens the file, plans its
first step, and then STEPS more. A step has 4,096 samples, and the process is one of 8. Figures per size:

- first_step_ms, resume_ms: from opening the file to the micro-batches of the first step, or of the one in the middle
- step_ms: each further step, median
- private_mib: memory that belongs to the process alone after all steps, above that of a bare interpreter
- mapped_mib: pages of the file that the process has mapped; the page cache holds them once for all processes

Then a step of 4,096 processes is planned for every one of them, for three global batches of a billion samples. Writes
scale.json and scale.md into the output folder. The file takes 2 bytes per sample there and is removed at the end.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.launching import ROOT
from shared.plan.batches import Plan

SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
TILE = 10**6  # lengths that the file repeats
FIGURES = ("first_step_ms", "resume_ms", "step_ms", "private_mib")
BATCHES = (2, 4, 8)  # samples of a step per process


def write_lengths(path: Path, samples: int) -> None:
    """Write uint16 [samples] from 8 to 512, like those of texts; sample 0 is a longest one."""
    tile = np.clip(np.random.default_rng(0).lognormal(4.5, 0.7, TILE), 8, 512).astype(np.uint16)
    tile[0] = 512
    with path.open("wb") as file:
        for start in range(0, samples, TILE):
            tile[: samples - start].tofile(file)


def figures_of(lengths: Path, samples: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of one data set: of a process at the first step, and of one in the middle of the first epoch."""
    batch = arguments.global_batch_size

    def child(first_step: int) -> dict[str, float]:
        script = ROOT / "benchmarks/harness/plan_of_size.py"
        words = [sys.executable, script, lengths, samples, first_step, arguments.steps, batch]
        done = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    return {"samples": samples, **child(0), "resume_ms": child(samples // 2 // batch)["first_step_ms"]}


def plan_of_all(lengths: Path, samples: int, processes: int, batch: int) -> dict[str, Any]:
    """Milliseconds of each process for its own plan of a step, and how often they read each sample of it, together."""
    mapped = np.memmap(lengths, np.uint16, "r", shape=(samples,)).view(np.ndarray)
    sizes = {"seed": 0, "global_batch_size": batch, "num_epochs": 1, "max_tokens": 16_384, "num_processes": processes}
    plan = Plan(lengths=mapped, longest=0, **sizes)
    step, taken, read = plan.total_steps // 2, [], []
    for rank in range(processes):
        begun = time.perf_counter()
        mine = plan.micro_batches(step, rank)
        taken.append(1000 * (time.perf_counter() - begun))
        read += [micro_batch.samples for micro_batch in mine if micro_batch.counted]
    asked = np.sort(plan.global_batch(step)[0])
    found = np.sort(np.concatenate(read))
    return {
        "processes": processes,
        "global_batch_size": batch,
        "median_ms": statistics.median(taken),
        "largest_ms": max(taken),
        "each_sample_once": bool(len(found) == batch and np.array_equal(found, asked)),
    }


def main() -> None:
    parser = rounds.parser(__doc__, "out/scale")
    parser.add_argument("--samples", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=200, help="steps after the first one of a process")
    parser.add_argument("--global_batch_size", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=4096)
    arguments = parser.parse_args()
    lengths = rounds.make_runs_folder(arguments.output_dir) / "lengths"
    smallest, largest = min(arguments.samples), max(arguments.samples)
    try:
        write_lengths(lengths, largest)
        by_name = {f"{samples:,}": samples for samples in sorted(arguments.samples)}
        rows = rounds.take_turns(
            list(by_name), arguments.rounds, lambda name, _: figures_of(lengths, by_name[name], arguments)
        )
        comparisons = {
            f"{figure}, {largest:,} / {smallest:,} samples": rounds.compare(
                rows, figure, f"{largest:,}", f"{smallest:,}"
            )
            for figure in FIGURES
        }
        for each in BATCHES:
            found = plan_of_all(lengths, largest, arguments.processes, each * arguments.processes)
            print(found, flush=True)
            once = "each sample once" if found["each_sample_once"] else "SAMPLES MISSING OR READ TWICE"
            name = f"ms of one of {arguments.processes:,} processes, {found['global_batch_size']:,} samples ({once})"
            comparisons[name] = rounds.summary([found["median_ms"]]) | found
    finally:
        lengths.unlink(missing_ok=True)
    rounds.save(arguments, "scale", 1, rows, comparisons)


if __name__ == "__main__":
    main()
