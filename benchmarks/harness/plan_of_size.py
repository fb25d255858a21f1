"""Plan steps of a data set of a given size in this process, and print what they took as a line of JSON.

    python benchmarks/harness/plan_of_size.py LENGTHS SAMPLES FIRST_STEP STEPS GLOBAL_BATCH_SIZE

LENGTHS is a file of uint16, of which the first SAMPLES are used; sample 0 is a longest one. STEPS are planned after
FIRST_STEP.
"""

import json
import statistics
import sys
import time
from pathlib import Path


def resident(kind: str, process: int | str = "self") -> float:
    """MiB of a process in memory: RssAnon, which belongs to it, RssFile, which processes share; VmHWM, the largest."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


class Stopwatch:
    """Milliseconds of the clock, and of this process on a processor, from its making to `stop`."""

    def __init__(self) -> None:
        self.ms, self.cpu_ms = -1000 * time.perf_counter(), -1000 * time.process_time()

    def stop(self) -> None:
        """Keep the time that has passed."""
        self.ms, self.cpu_ms = self.ms + 1000 * time.perf_counter(), self.cpu_ms + 1000 * time.process_time()


def main() -> None:
    private = resident("RssAnon")  # of the interpreter
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    import numpy as np

    from shared.plan.batches import Plan

    samples, first, steps, batch = map(int, sys.argv[2:])
    mapped = resident("RssFile")
    taken = [Stopwatch()]
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
    taken[0].stop()
    since_start = 1000 * time.process_time()
    for step in range(first + 1, first + 1 + steps):
        taken.append(Stopwatch())
        plan.micro_batches(step)
        taken[-1].stop()
    found = {"first_step_ms": taken[0].ms, "first_step_cpu_ms": taken[0].cpu_ms, "since_start_cpu_ms": since_start}
    found |= {"step_ms": statistics.median(each.ms for each in taken[1:])}
    found |= {"step_cpu_ms": statistics.median(each.cpu_ms for each in taken[1:])}
    found |= {"private_mib": resident("RssAnon") - private, "mapped_mib": resident("RssFile") - mapped}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
