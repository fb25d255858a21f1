"""Measure exposed communication in two ways: as the monitor reports it, and against steps without synchronization.

    torchrun --nproc-per-node 2 benchmarks/exposed_communication.py --output_dir out/exposed_communication

Every process computes the same batch in turns with DDP's all-reduce and under `no_sync`, without an all-reduce. The
difference of the two step times is the cost of the communication, and the monitor should report the same. Waiting for a
slower process would distort it, so the processes have equal work and meet at a barrier before each step. Writes
exposed_communication.json and exposed_communication.md into the output folder.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine
from shared.config.options import Options
from shared.launch import starting
from shared.launch.gradient_compression import DDPSettings
from shared.monitoring.monitor import Monitor
from shared.plan.batches import MicroBatch
from shared.processes import ending


def measure(width: int, layers: int, rows: int, steps: int) -> dict[str, float]:
    """Medians over the steps, in seconds: with and without synchronization, and the monitor's exposed communication."""
    accelerator = starting.start(Options())
    torch.manual_seed(0)
    accelerator.ddp_handler = DDPSettings()
    blocks = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = accelerator.prepare(torch.nn.Sequential(*blocks))
    monitor = Monitor(accelerator, None, lambda: 0.0, {}, model, Options(peak_tflops=1.0))
    samples, batch, skipped = np.arange(rows), torch.randn(rows, width), torch.tensor(0.0)
    times: dict[bool, list[float]] = {True: [], False: []}
    exposed = []
    for step in range(2 * steps + 4):
        synchronized = step % 2 == 0
        dist.barrier()
        monitor.read()
        started = time.perf_counter()
        with nullcontext() if synchronized else model.no_sync():
            loss = model(batch).pow(2).mean()
            loss.backward()
        monitor.add(MicroBatch(step, 0, samples, samples * 0, rows, last=synchronized), loss)
        seconds = time.perf_counter() - started
        monitor.end_step(skipped)
        model.zero_grad()
        figures = monitor.read()
        if step >= 4:
            times[synchronized].append(seconds)
            if synchronized:
                exposed.append(figures["communication"] * figures["step_seconds"])
    with_sync, without = statistics.median(times[True]), statistics.median(times[False])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": rows,
        "with_sync": with_sync,
        "without_sync": without,
        "difference": with_sync - without,
        "monitor": statistics.median(exposed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output_dir", type=Path, default=Path("out/exposed_communication"))
    arguments = parser.parse_args()
    rows = [measure(arguments.width, arguments.layers, count, arguments.steps) for count in arguments.rows]
    if dist.get_rank() == 0:
        about: dict[str, Any] = {"machine": machine(dist.get_world_size()), "command": command()}
        at = about["machine"]
        lines = [
            f"{at['cpu']}, {at['date'][:10]}; medians of {arguments.steps}. `{about['command']}`",
            "",
        ]
        lines += ["| rows | step (ms) | without synchronization (ms) | difference (ms) | monitor's exposed (ms) |"]
        lines += ["|---:|---:|---:|---:|---:|"]
        for row in rows:
            shown = [f"{row[name] * 1e3:.1f}" for name in ("with_sync", "without_sync", "difference", "monitor")]
            lines.append(f"| {row['rows']} | " + " | ".join(shown) + " |")
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        (arguments.output_dir / "exposed_communication.json").write_text(
            json.dumps([row | about for row in rows], indent=1) + "\n"
        )
        (arguments.output_dir / "exposed_communication.md").write_text("\n".join([*lines, ""]))
        print("\n".join(lines))
    ending.end()


if __name__ == "__main__":
    main()
