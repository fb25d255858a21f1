"""Measure how long a user waits for --help, an error, the embedded data, a plan, and the first step of the demo.

    python benchmarks/waits_before_training.py --rounds 3 --output_dir out/waits_before_training

Each wait is measured --rounds times, in seconds and in CPU seconds of all processes; other work on the machine hardly
changes the latter. The table also has the limit that is promised. The embedded data is collected into a new cache,
which the demo then uses. Prints the table and writes waits_before_training.json into the output folder.
"""

import argparse
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.launching import ROOT
from shared.plan.batches import Plan

BIN = Path(sys.executable).parent
SAMPLES, PLANS = 4096, 50


def seconds(command: list[Any], until: str | None = None) -> tuple[float, float]:
    """Seconds and CPU seconds of a command until it ends, or until it prints a line that begins with `until`.

    Raises:
        RuntimeError: the command ended without such a line.
    """
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    said = []
    for line in process.stdout:
        said.append(line)
        if until and line.startswith(until):
            break
    taken = time.perf_counter() - begun
    if until:
        if not (said and said[-1].startswith(until)):
            raise RuntimeError(f"{shlex.join(map(str, command))} ended before {until!r}:\n{''.join(said)[-3000:]}")
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def planning() -> tuple[float, float]:
    """Median seconds and CPU seconds of the plan of a step: 4,096 of a million samples of 1 to 500 tokens."""
    lengths = np.random.default_rng(0).integers(1, 500, 1_000_000)
    sizes = {"global_batch_size": SAMPLES, "num_epochs": 1, "max_tokens": 16_384}
    plan = Plan(lengths=lengths, seed=0, **sizes, num_processes=2, process_index=0)
    clock, cpu = [], []
    for step in range(PLANS):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        plan.micro_batches(step)
        clock.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - begun_cpu)
    return statistics.median(clock), statistics.median(cpu)


def measurements(folder: Path) -> dict[str, tuple[float, Callable[[int], tuple[float, float]]]]:
    """By name: the promised limit in seconds, and a function that measures seconds and CPU seconds in a round."""
    python, nlp = sys.executable, ROOT / "recipes/nlp.py"
    one_class = folder / "one_class.csv"
    one_class.write_text("text,label\none,a\ntwo,a\n")
    wrong = {
        "an unknown flag": ["--sede", 1],
        "a missing file": ["--train_file", folder / "missing.csv"],
        "one class only": ["--train_file", one_class],
        "fewer samples per step than processes": ["--global_batch_size", 1],
    }

    def gather(round_: int) -> tuple[float, float]:
        os.environ["ACCELERATE_RECIPES_CACHE"] = str(folder / f"cache-{round_}")
        return seconds([python, "-c", "from shared.datasets import demo_texts; demo_texts.load()"])

    def error(flags: list[Any]) -> Callable[[int], tuple[float, float]]:
        launch = [BIN / "torchrun", "--nproc-per-node", 2, nlp, "--output_dir", folder / "wrong"]
        return lambda _: seconds([*launch, *flags])

    def first_step(round_: int) -> tuple[float, float]:
        demo = [python, nlp, "--logging_steps", 1, "--checkpointing_steps", "no", "--output_dir"]
        seconds([*demo, folder / f"demo-{round_}-cold"], until="step 1/")  # fills the caches
        return seconds([*demo, folder / f"demo-{round_}"], until="step 1/")

    found: dict[str, tuple[float, Callable[[int], tuple[float, float]]]] = {
        f"--help of {recipe.name}": (3, lambda _, recipe=recipe: seconds([python, recipe, "--help"]))
        for recipe in sorted(ROOT.glob("recipes/*.py"))
    }
    found["collecting the embedded docstrings"] = (20, gather)
    found |= {f"error for {what}, 2 processes": (20, error(flags)) for what, flags in wrong.items()}
    found["launch of the demo to its first step"] = (12, first_step)
    found[f"plan of a step of {SAMPLES:,} samples"] = (0.005, lambda _: planning())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="measure only the waits whose name contains these words")
    parser.add_argument("--output_dir", type=Path, default=Path("out/waits_before_training"))
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    chosen = {name: one for name, one in measurements(folder).items() if (arguments.only or "") in name}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for round_ in range(arguments.rounds):
        for name, (_, measure) in chosen.items():
            taken[name].append(measure(round_))
    rows = [
        {
            "what": name,
            "promised_seconds": chosen[name][0],
            "seconds": [clock for clock, _ in each],
            "cpu_seconds": [cpu for _, cpu in each],
        }
        for name, each in taken.items()
    ]
    about = {"machine": rounds.machine(2), "command": rounds.command()}
    (arguments.output_dir / "waits_before_training.json").write_text(
        json.dumps(about | {"rows": rows}, indent=1) + "\n"
    )
    print("| | promised (s) | seconds, median (min-max) | CPU seconds |\n|---|---:|---:|---:|")
    for row in rows:
        figures = [
            f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"
            for values in (row["seconds"], row["cpu_seconds"])
        ]
        print(f"| {row['what']} | {row['promised_seconds']:g} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
