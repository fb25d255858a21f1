"""What the benchmarks of the lanes in docs/performance.md share: turns, ratios with an interval, a file and a table.

A lane is one comparison. Its contestants take turns, each round begins with another one, and what is compared are
ratios within a round: a machine that slows down for a minute slows both sides down.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def take_turns(names: Sequence[str], rounds: int, run: Callable[[str, int], Row]) -> list[Row]:
    """`run(name, round)` for each name in each round, another one first each time; prints each row as it comes."""
    rows = []
    for round_, name in turns(names, rounds):
        row = {"contestant": name, "round": round_, **run(name, round_)}
        print(f"round {round_} {name:18} " + "  ".join(shown(k, v) for k, v in row.items() if is_figure(k, v)))
        sys.stdout.flush()
        rows.append(row)
    return rows


def take_turns_in_group(names: Sequence[str], rounds: int, run: Callable[[str, int], Row]) -> list[Row]:
    """`take_turns` in all processes of torch's group, which ends with it; the main one alone prints and has rows."""
    import torch.distributed as dist

    main_process = dist.get_rank() == 0
    with contextlib.nullcontext() if main_process else contextlib.redirect_stdout(io.StringIO()):
        rows = take_turns(names, rounds, run)
    dist.barrier()
    dist.destroy_process_group()
    return rows if main_process else []


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and contestant, one after the other; another one begins each round."""
    for round_ in range(rounds):
        first = round_ % len(names)
        yield from ((round_, name) for name in [*names[first:], *names[:first]])


def by_round(rows: Sequence[Row], one: str, other: str, figure: str) -> list[float]:
    """`figure` of contestant `one` over that of `other`, for each round that has both."""
    value = {(row["contestant"], row["round"]): row[figure] for row in rows}
    return [value[one, r] / value[other, r] for name, r in value if name == other and (one, r) in value]


def is_figure(key: str, value: object) -> bool:
    """Whether a field of a row is something measured that fits into a line."""
    return key != "round" and isinstance(value, int | float)


def shown(key: str, value: float) -> str:
    """`seconds 1.234`."""
    return f"{key} {value:.4g}"


def compare(rows: Sequence[Row], figure: str, one: str, other: str, difference: bool = False) -> dict[str, Any]:
    """`figure` of contestant `one` over that of `other` (or minus it), round by round, as `summary` gives it."""
    value = {(row["contestant"], row["round"]): row[figure] for row in rows}
    rounds = sorted({round_ for name, round_ in value if name == one and (other, round_) in value})
    pairs = [(value[one, round_], value[other, round_]) for round_ in rounds]
    return summary([mine - theirs if difference else mine / theirs for mine, theirs in pairs])


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median of a figure that each round gave, and a bootstrap interval of it that holds 95 % of the resamples."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"median": statistics.median(values), "low": float(low), "high": float(high), "rounds": list(values)}


def machine(processes: int) -> dict[str, Any]:
    """What was measured on, and with what."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    packages = ("torch", "accelerate", "transformers", "tokenizers", "numpy")
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": min(processes, len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """How this process was started, as one would type it."""
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # under torchrun
    launcher = ["torchrun", "--nproc-per-node", processes] if processes else ["python"]
    return shlex.join([*launcher, "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])


def parser(doc: str, output_dir: str) -> argparse.ArgumentParser:
    """The flags that every lane has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--output_dir", type=Path, default=Path(output_dir))
    return made


def fresh_folder(arguments: argparse.Namespace) -> Path:
    """The folder for the files of the launches, which must not be there yet."""
    folder = arguments.output_dir.resolve() / "runs"
    if folder.exists():
        sys.exit(f"{folder} exists: name a fresh --output_dir")
    folder.mkdir(parents=True)
    return folder


def save(
    arguments: argparse.Namespace,
    name: str,
    processes: int,
    rows: Sequence[Row],
    comparisons: dict[str, dict[str, Any]],
    unit: str = "",
) -> None:
    """Leave NAME.json and NAME.md in the output folder: machine, command, rows, what was compared."""
    at = machine(processes)
    report = {
        "machine": at,
        "command": command(),
        "load_average": os.getloadavg(),
        "rows": list(rows),
        "comparisons": comparisons,
    }
    lines = [
        f"{at['cpu']}, {at['cores_used']} of {at['cores']} cores, load {report['load_average'][0]:.1f}; torch "
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
