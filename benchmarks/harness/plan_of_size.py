"""Plan steps of a data set of a given size in this process, and print what they took as a line of JSON.

    python benchmarks/harness/plan_of_size.py LENGTHS SAMPLES FIRST_STEP STEPS GLOBAL_BATCH_SIZE

LENGTHS is a file of uint16, of which the first SAMPLES are used; sample 0 is a longest one. STEPS are planned after
FIRST_STEP.
"""

import json
import sys
import time
from pathlib import Path


def resident(kind: str, process: int | str = "self") -> float:
    """MiB of a process in memory: RssAnon, which belongs to it, RssFile, which processes share; VmHWM, the largest."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def now() -> tuple[float, float]:
    """Milliseconds of the clock, and of this process on a processor."""
    return 1000 * time.perf_counter(), 1000 * time.process_time()


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    import numpy as np

    from shared.plan.batches import Plan

    samples, first, steps, batch = map(int, sys.argv[2:])
    private, mapped = resident("RssAnon"), resident("RssFile")  # with the imports
    marks = [now()]
    lengths = np.memmap(sys.argv[1], np.uint16, "r", shape=(samples,)).view(np.ndarray)
    plan = Plan(
        lengths=lengths,
        longest=0,
        padded=lambda lengths: -(-lengths // 8) * 8,
        weights=lengths,
        seed=0,
        global_batch_size=batch,
        max_steps=1 << 40,
        max_tokens=16_384,
        num_processes=8,
    )
    plan.micro_batches(first)
    marks.append(now())
    for step in range(first + 1, first + 1 + steps):
        plan.micro_batches(step)
        marks.append(now())
    ms, cpu_ms = np.diff(marks, axis=0).T
    found = {"first_step_ms": ms[0], "first_step_cpu_ms": cpu_ms[0]}
    found |= {"step_ms": np.median(ms[1:]), "step_cpu_ms": np.median(cpu_ms[1:])}
    found |= {"private_mib": resident("RssAnon") - private, "mapped_mib": resident("RssFile") - mapped}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
