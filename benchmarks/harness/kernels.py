"""What the GPU computes in a step: kernels by name, from a trace of torch's profiler."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LISTED = 45  # kernels


def kernels_per_step(trace: Path, steps: int) -> dict[str, Any]:
    """The kernels of a trace of `steps` steps, those that take most time first.

    Returns:
        `busy_ms` and `span_ms`: time of all kernels, and time from the first one's start to the last one's end; and
        `kernels`: name, `ms` and `count` of each. All per step. Without a GPU there are none.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") in ON_THE_GPU]
    if not events:
        return {"busy_ms": 0.0, "span_ms": 0.0, "kernels": []}
    microseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        microseconds[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    span = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    per_step = 1000 * steps
    kernels = [
        {"name": name, "ms": spent / per_step, "count": counts[name] / steps}
        for name, spent in microseconds.most_common(LISTED)
    ]
    return {"busy_ms": sum(microseconds.values()) / per_step, "span_ms": span / per_step, "kernels": kernels}
