"""How long one waits before a run trains: for help, a refusal, the embedded data, a plan, the first step of the demo.

    python benchmarks/start.py --rounds 3 --output_dir out/start

Each is measured --rounds times, by the clock and in CPU seconds of all processes, which other work on the machine
leaves alone; beside it stands what is promised. The embedded data is gathered into a cache of its own, which the demo
then finds there. Leaves start.json and prints a table.
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
from peers import ROOT, machine

from shared.plan.batches import Plan

BIN = Path(sys.executable).parent
SAMPLES, PLANS = 4096, 50


def seconds(command: list[Any], until: str | None = None) -> tuple[float, float]:
    """Clock and CPU seconds of a command, to its end, or to the first line that begins with `until`."""
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
    """The median time of a plan for a step of 4,096 samples out of a million, of 1 to 500 tokens, as rank 0 of 2."""
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
    """What is measured: the most seconds that are promised, and how a round measures it."""
    python, nlp = sys.executable, ROOT / "recipes/nlp.py"
    one_class = folder / "one_class.csv"
    one_class.write_text("text,label\none,a\ntwo,a\n")
    refused = {
        "an unknown flag": ["--sede", 1],
        "a file that is missing": ["--train_file", folder / "missing.csv"],
        "one class only": ["--train_file", one_class],
        "fewer samples per step than processes": ["--global_batch_size", 1],
    }

    def gather(round_: int) -> tuple[float, float]:
        os.environ["ACCELERATE_RECIPES_CACHE"] = str(folder / f"cache-{round_}")
        return seconds([python, "-c", "from shared.datasets import demo_texts; demo_texts.load()"])

    def refusal(flags: list[Any]) -> Callable[[int], tuple[float, float]]:
        launch = [BIN / "torchrun", "--nproc-per-node", 2, nlp, "--output_dir", folder / "refused"]
        return lambda _: seconds([*launch, *flags])

    def first_step(round_: int) -> tuple[float, float]:
        demo = [python, nlp, "--logging_steps", 1, "--checkpointing_steps", "no", "--output_dir"]
        seconds([*demo, folder / f"demo-{round_}-cold"], until="step 1/")  # everything is cached after this
        return seconds([*demo, folder / f"demo-{round_}"], until="step 1/")

    found: dict[str, tuple[float, Callable[[int], tuple[float, float]]]] = {
        f"--help of {recipe.name}": (3, lambda _, recipe=recipe: seconds([python, recipe, "--help"]))
        for recipe in sorted(ROOT.glob("recipes/*.py"))
    }
    found["the embedded docstrings, gathered"] = (20, gather)
    found |= {f"refusal of {what}, 2 processes": (20, refusal(flags)) for what, flags in refused.items()}
    found["launch of the demo to its first step"] = (12, first_step)
    found[f"plan of a step of {SAMPLES:,} samples"] = (0.005, lambda _: planning())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="measure only what has these words in its name")
    parser.add_argument("--output_dir", type=Path, default=Path("out/start"))
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve() / "runs"
    if folder.exists():
        parser.error(f"{folder} exists: name a fresh --output_dir")
    folder.mkdir(parents=True)
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
    about = {"machine": machine(2), "command": shlex.join(["python", *sys.argv])}
    (arguments.output_dir / "start.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print("| | promised (s) | seconds, median (min-max) | CPU seconds |\n|---|---:|---:|---:|")
    for row in rows:
        figures = [
            f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"
            for values in (row["seconds"], row["cpu_seconds"])
        ]
        print(f"| {row['what']} | {row['promised_seconds']:g} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
