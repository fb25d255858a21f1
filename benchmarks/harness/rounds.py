"""Let contestants take turns, compare them within each round, and write the results as JSON and as a table.

Each round begins with a different contestant. The ratios are taken within a round, because a machine that slows down
for a minute slows down all contestants of that round.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def take_turns(names: Sequence[str], rounds: int, run: Callable[[str, int], Row]) -> list[Row]:
    """Call `run(name, round)` for each name in each round, which begins with the next name; print each row at once."""
    rows = []
    for turn in range(rounds * len(names)):
        round_, place = divmod(turn, len(names))
        name = names[(round_ + place) % len(names)]
        row = {"contestant": name, "round": round_, **run(name, round_)}
        print(f"round {round_} {name:18} " + "  ".join(f"{k} {v:.4g}" for k, v in row.items() if is_figure(k, v)))
        sys.stdout.flush()
        rows.append(row)
    return rows


def is_figure(key: str, value: object) -> bool:
    """Whether a field of a row is a measured number."""
    return key != "round" and isinstance(value, int | float)


def compare(rows: Sequence[Row], figure: str, one: str, other: str, difference: bool = False) -> dict[str, Any]:
    """`figure` of contestant `one` divided by that of `other` (or their difference) in each round, as a `summary`."""
    value = {(row["contestant"], row["round"]): row[figure] for row in rows}
    rounds = sorted({round_ for name, round_ in value if name == one and (other, round_) in value})
    pairs = [(value[one, round_], value[other, round_]) for round_ in rounds]
    return summary([mine - theirs if difference else mine / theirs for mine, theirs in pairs])


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median over the rounds, and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"median": statistics.median(values), "low": float(low), "high": float(high), "rounds": list(values)}


def machine(processes: int) -> dict[str, Any]:
    """The processor with the instructions that torch uses, its cores, the versions of Python and packages, the date."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    packages = ("torch", "accelerate", "transformers", "tokenizers", "numpy")
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": f"{models[0] if models else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "cores_used": min(processes, len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """The command that started this process, as a user types it."""
    return shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])


def parser(doc: str, output_dir: str) -> argparse.ArgumentParser:
    """A parser with the flags that these benchmarks share."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--output_dir", type=Path, default=Path(output_dir))
    return made


def make_runs_folder(output_dir: Path) -> Path:
    """Make OUTPUT_DIR/runs for the files of the launches; if it exists, end the process with exit code 2."""
    folder = output_dir.resolve() / "runs"
    if folder.exists():
        print(f"error: --output_dir {output_dir} has runs already: give a new folder", file=sys.stderr)
        sys.exit(2)
    folder.mkdir(parents=True)
    return folder


def save(
    arguments: argparse.Namespace,
    name: str,
    processes: int,
    rows: Sequence[Row],
    comparisons: dict[str, dict[str, Any]],
    unit: str = "",
    gpu: str = "",
) -> None:
    """Write NAME.json and NAME.md into the output folder: machine, command, rows and comparisons.

    `gpu` is the name of the GPU that was measured.
    """
    at = machine(processes) | ({"gpu": gpu} if gpu else {})
    report = {
        "machine": at,
        "command": command(),
        "load_average": os.getloadavg(),
        "rows": list(rows),
        "comparisons": comparisons,
    }
    where = f"{gpu}, {at['cpu']}" if gpu else at["cpu"]
    lines = [
        f"{where}, {at['cores_used']} of {at['cores']} cores, load {report['load_average'][0]:.1f}; torch "
        f"{at['versions']['torch']}, accelerate {at['versions']['accelerate']}, transformers "
        f"{at['versions']['transformers']}; {at['date'][:10]}. `{command()}`",
        "",
        f"| compared | median{f' ({unit})' if unit else ''} | 95 % interval | rounds |",
        "|---|---:|---:|---:|",
    ]
    for pair, found in comparisons.items():
        interval = f"{found['low']:.4g} to {found['high']:.4g}"
        lines.append(f"| {pair} | {found['median']:.4g} | {interval} | {len(found['rounds'])} |")
    figures = [key for key, value in rows[0].items() if is_figure(key, value)] if rows else []
    if figures:
        lines += ["", "| contestant, medians | " + " | ".join(figures) + " |", "|---|" + "---:|" * len(figures)]
        for contestant in dict.fromkeys(row["contestant"] for row in rows):
            mine = [row for row in rows if row["contestant"] == contestant]
            middle = [f"{statistics.median(row[key] for row in mine):.4g}" for key in figures]
            lines.append(f"| {contestant} | " + " | ".join(middle) + " |")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join([*lines, ""])
    (arguments.output_dir / f"{name}.md").write_text(text)
    print(text)
