"""Measure the time that the monitor adds to a step and to a reading: its calls without a model, in one process.

    python benchmarks/monitor_cost.py --output_dir out/monitor_cost

The calls are those of a recipe's step: for each micro-batch the hook before the forward pass and the count after the
backward pass, then the end of the step. The figures are medians over the rounds. Writes monitor_cost.json into the
output folder.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine
from shared.config.options import Options
from shared.launch import starting
from shared.monitoring.monitor import Monitor
from shared.plan.batches import Plan
from shared.processes import ending


def measure(rounds: int, steps: int, micro_batches: int) -> dict[str, float]:
    """Seconds of a step's calls and of a reading: medians over rounds of `steps` steps and one reading."""
    accelerator = starting.start(Options())
    lengths = np.random.default_rng(0).integers(10, 100, 4096)
    plan = Plan(lengths=lengths, seed=0, global_batch_size=32, micro_batches=micro_batches, max_steps=steps)
    model = torch.nn.Linear(1, 1)
    monitor = Monitor(accelerator, lengths, lambda: 0.0, {}, model, Options(peak_tflops=1.0))
    ids, loss, skipped = (torch.zeros(8, 100), torch.tensor(1.0), torch.tensor(0.0))
    work = [plan.micro_batches(step) for step in range(steps)]
    per_step, per_reading = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for pieces in work:
            for piece in pieces:
                monitor.passes._begin(model, (ids,), {})
                monitor.add(piece, loss)
            monitor.end_step(skipped)
        stepped = time.perf_counter()
        monitor.read()
        per_step.append((stepped - started) / steps)
        per_reading.append(time.perf_counter() - stepped)
    return {"step_seconds": statistics.median(per_step), "reading_seconds": statistics.median(per_reading)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10, help="steps from one reading to the next")
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--output_dir", type=Path, default=Path("out/monitor_cost"))
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.steps, arguments.micro_batches)
    about = {"machine": machine(1), "command": command()}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "monitor_cost.json").write_text(json.dumps(found | about, indent=1) + "\n")
    whole = found["step_seconds"] + found["reading_seconds"] / arguments.steps
    print(
        f"{found['step_seconds'] * 1e3:.3f} ms per step of {arguments.micro_batches} micro-batches, "
        f"{found['reading_seconds'] * 1e3:.3f} ms per reading: {whole / 0.02:.2%} of a step of 20 ms"
    )
    ending.end()


if __name__ == "__main__":
    main()
