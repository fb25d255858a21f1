"""Measure the plan on data sets of 100,000 to a billion samples, and for 4,096 processes.

    python benchmarks/scale.py --output_dir out/scale

The data sets are made up: a memory-mapped file of lengths, as data preparation leaves it, in the page cache. Each turn
starts two new processes, one at the first step and one in the middle of the first epoch. Each opens the file, plans its
first step, and then STEPS more. A step has 4,096 samples, and the process is one of 8. Figures per size:

- first_step_ms, resume_ms: from opening the file to the micro-batches of the first step, or of the one in the middle
- step_ms: each further step, median
- the same with cpu: time on a processor, for a machine that has other work
- private_mib: memory that belongs to the process alone after all steps, above that after its imports
- mapped_mib: pages of the file that the process has mapped; the page cache holds them once for all processes

Then a step of 4,096 processes is planned for every one of them, for three global batches of the largest data set. 16 of
them are timed, each with a plan of its own, which gives the same micro-batches. Writes scale.json and scale.md into the
output folder. The file takes 2 bytes per sample there and is removed at the end.

    python benchmarks/scale.py --samples 10000000 --rounds 1 --steps 10 --processes 8 64 512 4096 \
        --samples_per_process 64 256 --images_per_process 384 --output_dir out/scale_processes

plans for other numbers of processes, and for images, which have no lengths.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.launching import ROOT
from shared.plan import draws
from shared.plan.batches import Plan

SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
TILE = 10**6  # lengths that the file repeats
FIGURES = ("first_step_cpu_ms", "resume_cpu_ms", "step_cpu_ms", "private_mib")  # that are compared
TIMED = 16  # processes of a large launch whose own plans are timed
BATCHES = (2, 4, 8)  # samples of a step per process
BUDGETS = {"texts": {"max_tokens": 16_384}, "images": {"max_samples": 1024}}  # of a micro-batch


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
        words = map(str, (sys.executable, script, lengths, samples, first_step, arguments.steps, batch))
        return json.loads(subprocess.check_output([*words]))

    start, middle = child(0), child(samples // 2 // batch)
    resumed = {"resume_ms": middle["first_step_ms"], "resume_cpu_ms": middle["first_step_cpu_ms"]}
    return {"samples": samples, **start, **resumed}


def plan_of_all(lengths: Path, samples: int, processes: int, batch: int, kind: str = "texts") -> dict[str, Any]:
    """Milliseconds on a processor of one process for its plan of a step, and whether all read each sample once.

    Args:
        lengths: the file of lengths; images have none.
        samples: of the data set.
        processes: of the run.
        batch: samples of the step.
        kind: a key of BUDGETS.
    """
    data: dict[str, Any] = {"num_samples": samples}
    if kind == "texts":
        data = {"lengths": np.memmap(lengths, np.uint16, "r", shape=(samples,)).view(np.ndarray), "longest": 0}
    sizes = {"seed": 0, "global_batch_size": batch, "num_epochs": 1, "num_processes": processes} | BUDGETS[kind]
    plan = Plan(**data, **sizes)
    step, taken = plan.total_steps // 2, []
    everyone = plan.micro_batches_of_all(step)
    for rank in range(0, processes, -(-processes // TIMED)):
        own = Plan(**data, **sizes, process_index=rank)
        draws._block.cache_clear()  # another process would not have it
        begun = time.process_time()
        mine = own.micro_batches(step)
        taken.append(1000 * (time.process_time() - begun))
        assert [m.samples.tolist() for m in mine] == [m.samples.tolist() for m in everyone[rank]]
    found = np.sort(np.concatenate([m.samples for mine in everyone for m in mine if m.counted]))
    asked = np.sort(plan.global_batch(step)[0])
    return {
        "processes": processes,
        "global_batch_size": batch,
        "kind": kind,
        "cpu_ms": taken,
        "each_sample_once": bool(len(found) == batch and np.array_equal(found, asked)),
    }


def main() -> None:
    parser = rounds.parser(__doc__, "out/scale")
    parser.add_argument("--samples", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=200, help="steps after the first one of a process")
    parser.add_argument("--global_batch_size", type=int, default=4096)
    parser.add_argument("--processes", type=int, nargs="+", default=[4096])
    parser.add_argument("--samples_per_process", type=int, nargs="+", default=list(BATCHES), help="texts of a step")
    parser.add_argument("--images_per_process", type=int, nargs="+", default=[], help="images of a step")
    arguments = parser.parse_args()
    lengths = rounds.make_runs_folder(arguments.output_dir) / "lengths"
    smallest, largest = min(arguments.samples), max(arguments.samples)
    try:
        write_lengths(lengths, largest)
        by_name = {f"{samples:,}": samples for samples in sorted(arguments.samples)}
        rows = rounds.take_turns(
            list(by_name), arguments.rounds, lambda name, _: figures_of(lengths, by_name[name], arguments)
        )
        ends = f"{largest:,}", f"{smallest:,}"
        compared = FIGURES if smallest < largest else ()
        comparisons = {f"{what}, {' / '.join(ends)} samples": rounds.compare(rows, what, *ends) for what in compared}
        steps = [("texts", each) for each in arguments.samples_per_process]
        steps += [("images", each) for each in arguments.images_per_process]
        for (kind, each), processes in product(steps, arguments.processes):
            batch = each * processes
            found = plan_of_all(lengths, largest, processes, batch, kind)
            print(found, flush=True)
            once = "each sample once" if found["each_sample_once"] else "SAMPLES MISSING OR READ TWICE"
            of = f"{processes:,} processes, {batch:,} {'images' if kind == 'images' else 'samples'}"
            comparisons[f"CPU ms of one of {of} ({once})"] = rounds.summary(found["cpu_ms"]) | found
    finally:
        lengths.unlink(missing_ok=True)
    rounds.save(arguments, "scale", 1, rows, comparisons)


if __name__ == "__main__":
    main()
