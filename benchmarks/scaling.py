"""How a recipe's speed grows with the number of processes, over the links and in the variants that are to be compared.

    python benchmarks/scaling.py --processes 1 2 --recipe nlp --steps 12 --strong --output_dir out/scaling
    python benchmarks/scaling.py --processes 2 --links 1000 100 --variants plain accumulate4 bf16_gradients ...

Strong scaling keeps the samples per step, weak scaling keeps those per process. Each combination is started as often as
--repeats says, in turns; the first part of each run is left out. Leaves scaling.json, scaling.md and scaling.png.
All on the CPU, but for --strategy dp, which compares torch.nn.DataParallel with DDP on GPUs.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any

import links
from peers import ROOT, machine

RECIPES = {"nlp": "nlp.py", "image": "image_classification.py", "mlm": "mlm.py"}
VARIANTS: dict[str, tuple[int, list[str], dict[str, int]]] = {  # times the samples per step, flags, settings of DDP
    "plain": (1, [], {}),
    "accumulate4": (4, [], {}),
    "accumulate16": (16, [], {}),
    "bf16": (1, ["--mixed_precision", "bf16"], {}),
    "bf16_gradients": (1, ["--gradient_compression", "bf16"], {}),
    "fp16_gradients": (1, ["--gradient_compression", "fp16"], {}),
    "power_sgd": (1, [], {"power_sgd_rank": 4, "bucket_cap_mb": 100}),  # of two buckets, gloo mixes up the messages
    "buckets1": (1, [], {"bucket_cap_mb": 1}),
    "buckets100": (1, [], {"bucket_cap_mb": 100}),
    "data_parallel": (1, [], {"data_parallel": 1}),  # GPUs, of one process: those that "plain" has processes on
}
FIGURES = {  # of a row, and the key of metrics.jsonl it is the mean of
    "samples_per_second": "samples_per_second",
    "tokens_per_second": "tokens_per_second",
    "step_seconds": "step_seconds",
    "communication_share": "communication",
    "data_wait_share": "data_wait",
    "padding_share": "padding",
    "peak_memory_bytes": "peak_memory_bytes",
}
TIMEOUT = 540  # seconds for one launch


def window(steps: int) -> int:
    """Steps from one line of metrics.jsonl to the next: a third of those that are timed."""
    return max(1, steps // 3)


def train(arguments: argparse.Namespace, processes: int, link: float, variant: str, output: Path) -> dict[str, Any]:
    """Start the recipe once, to its end; the means of its figures after the first part."""
    times, flags, settings = VARIANTS[variant]
    size = arguments.global_batch_size * times * (processes if arguments.weak else 1)
    if "data_parallel" in settings:
        settings, processes = {"data_parallel": processes}, 1
    every = window(arguments.steps)
    total = every + arguments.steps
    flags = [*flags, "--global_batch_size", size, "--max_train_steps", total, "--logging_steps", every]
    flags += ["--eval_steps", total, "--checkpointing_steps", "no", "--expect_processes", processes]
    flags += [*arguments.files, *shlex.split(arguments.flags), "--output_dir", output]
    script = [ROOT / "benchmarks/variant.py", json.dumps(settings), ROOT / "recipes" / RECIPES[arguments.recipe]]
    command = [str(word) for word in (sys.executable, *script, *flags)]
    gpus = arguments.gpus or arguments.strategy == "dp"
    with links.limited(processes, link) if link else nullcontext() as places:
        run_group(command, processes, places, arguments.hosts, output.with_suffix(".log"), gpus)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_seconds" in line][1:]
    figures = {}
    for name, key in FIGURES.items():
        values = [line[key] for line in timed if key in line]
        if len(values) == len(timed):  # each of as many steps, so rates are averaged by what a step took
            figures[name] = (statistics.harmonic_mean if "per_second" in key else statistics.mean)(values)
    return figures


def environment_of(
    rank: int, processes: int, places: Any, hosts: list[str] | None, port: int, gpus: bool
) -> dict[str, Any]:
    """What a process of the group finds in its environment; one alone belongs to none."""
    environment: dict[str, Any] = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "TQDM_DISABLE": 1}
    if not gpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    if processes == 1:
        return environment
    if places:
        environment["GLOO_SOCKET_IFNAME"] = places[rank][2]
    return environment | {
        "RANK": rank,
        "LOCAL_RANK": 0 if places or hosts else rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": 1 if places or hosts else processes,
        "MASTER_ADDR": places[0][1] if places else hosts[0] if hosts else "127.0.0.1",
        "MASTER_PORT": port,
    }


def run_group(
    command: list[str], processes: int, places: Any, hosts: list[str] | None, log: Path, gpus: bool = False
) -> None:
    """Start a process group without a launcher, each process where it belongs, and wait for its end.

    Raises:
        RuntimeError: a process failed, or the time was up; with the last lines of the first one's log.
    """
    with socket.socket() as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
    running, logs = [], []
    for rank in range(processes):
        environment = environment_of(rank, processes, places, hosts, port, gpus)
        prefix = places[rank][0] if places else []
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        words = ["ssh", hosts[rank % len(hosts)], shlex.join(words)] if hosts else [*prefix, *words]
        logs.append(log.with_suffix(f".{rank}.log").open("w+"))
        running.append(subprocess.Popen(words, stdout=logs[-1], stderr=subprocess.STDOUT, start_new_session=True))
    deadline = time.monotonic() + TIMEOUT
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(command)} took over {TIMEOUT} s")
            time.sleep(0.05)
        if failed := [rank for rank, process in enumerate(running) if process.poll()]:
            logs[failed[0]].seek(0)
            raise RuntimeError(f"{shlex.join(command)} failed:\n{logs[failed[0]].read()[-3000:]}")
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in logs:
            file.close()


def summarize(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per combination: medians over its repeats, the extremes of its rate, and its efficiency.

    Efficiency is the rate per process by that of the fewest processes with the same link and variant.
    """
    rows = []
    for key in dict.fromkeys((r["processes"], r["link_mbit"], r["variant"]) for r in found):
        mine = [r for r in found if (r["processes"], r["link_mbit"], r["variant"]) == key]
        middle = {name: statistics.median(r[name] for r in mine) for name in FIGURES if name in mine[0]}
        rates = [r["samples_per_second"] for r in mine]
        steps = [r["step_seconds"] for r in mine]
        rows.append(
            dict(zip(("processes", "link_mbit", "variant"), key, strict=True))
            | middle
            | {"repeats": len(mine), "samples_per_second_spread": [min(rates), max(rates)]}
            | {"step_seconds_spread": [min(steps), max(steps)]}
        )
    for row in rows:
        same = [r for r in rows if (r["link_mbit"], r["variant"]) == (row["link_mbit"], row["variant"])]
        base = min(same, key=lambda r: r["processes"])
        rate = base["samples_per_second"] / base["processes"]
        row["scaling_efficiency"] = row["samples_per_second"] / row["processes"] / rate
    return rows


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The rows as Markdown, with the machine and the command."""
    at = about["machine"]
    lines = [
        f"{at['cpu']}, {at['cores']} cores, one thread per process, torch {at['versions']['torch']}, {at['date'][:10]}"
        f"; medians of {rows[0]['repeats']} (extremes). `{about['command']}`",
        "",
        "| processes | link | variant | samples/s | step (s) | efficiency | communication | data | padding | memory |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["samples_per_second_spread"]
        link = f"{row['link_mbit']:g} Mbit/s" if row["link_mbit"] else "memory" if row["processes"] > 1 else ""
        padding = f"{row['padding_share']:.1%}" if "padding_share" in row else ""
        rate = f"{row['samples_per_second']:,.1f} ({low:,.1f}-{high:,.1f})"
        lines.append(
            f"| {row['processes']} | {link} | {row['variant']} | {rate} | {row['step_seconds']:.3f} | "
            f"{row['scaling_efficiency']:.0%} | {row['communication_share']:.0%} | "
            f"{row['data_wait_share']:.1%} | {padding} | {row['peak_memory_bytes'] / 2**20:,.0f} MiB |"
        )
    return "\n".join([*lines, ""])


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Rate over processes with the ideal line, if there are several numbers of them; else the rates as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    series = list(dict.fromkeys((r["variant"], r["link_mbit"]) for r in rows))
    names = [f"{variant}, {link:g} Mbit/s" if link else variant for variant, link in series]
    if len({r["processes"] for r in rows}) > 1:
        for (variant, link), name in zip(series, names, strict=True):
            mine = sorted(
                (r for r in rows if (r["variant"], r["link_mbit"]) == (variant, link)), key=lambda r: r["processes"]
            )
            counts = [r["processes"] for r in mine]
            low, high = zip(*(r["samples_per_second_spread"] for r in mine), strict=True)
            rates = [r["samples_per_second"] for r in mine]
            errors = [
                [a - b for a, b in zip(rates, low, strict=True)],
                [b - a for a, b in zip(rates, high, strict=True)],
            ]
            axes.errorbar(counts, rates, yerr=errors, marker="o", capsize=3, label=name)
            axes.plot(counts, [rates[0] * n / counts[0] for n in counts], "--", color="0.6", linewidth=1)
        axes.plot([], [], "--", color="0.6", label="ideal")
        axes.set_xlabel("processes")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0)
        axes.set_ylabel("samples per second")
        axes.legend(frameon=False)
    else:
        parts = {"communication": "communication_share", "waiting for data": "data_wait_share"}
        left = [0.0] * len(rows)
        shares = {name: [r[key] for r in rows] for name, key in parts.items()}
        shares = {"computation and the rest": [1 - sum(x) for x in zip(*shares.values(), strict=True)]} | shares
        for (name, values), color in zip(shares.items(), ("#0072B2", "#D55E00", "#E69F00"), strict=True):
            width = [r["step_seconds"] * v / VARIANTS[r["variant"]][0] for r, v in zip(rows, values, strict=True)]
            axes.barh(range(len(rows)), width, left=left, label=name, color=color)
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel("seconds for the samples of a plain step")
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


def data_files(recipe: str, folder: Path) -> list[str]:
    """Flags for the embedded texts with 32 to validate on, since a run ends with an evaluation that is not measured."""
    if recipe == "image":
        return []
    import pyarrow.parquet as pq

    from shared.datasets import demo_texts

    train, validation = demo_texts.load()
    pq.write_table(train, folder / "train.parquet")
    pq.write_table(validation.slice(0, 32), folder / "validation.parquet")
    return ["--train_file", str(folder / "train.parquet"), "--validation_file", str(folder / "validation.parquet")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--recipe", choices=list(RECIPES), default="nlp")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run, after a third as many more")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weak", action="store_true", help="samples per process stay")
    kind.add_argument("--strong", action="store_true", help="samples per step stay, the default")
    parser.add_argument("--global_batch_size", type=int, default=32, help="samples per step (weak: per process)")
    parser.add_argument("--links", type=float, nargs="+", default=[0], help="Mbit/s between processes; 0: no limit")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[:-1], default=["plain"])  # the last: below
    parser.add_argument("--strategy", choices=["ddp", "dp"], default="ddp", help="dp: DataParallel beside DDP, on GPUs")
    parser.add_argument("--hosts", nargs="+", help="machines with this folder and environment, reached by ssh")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each process; else all of them on the CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags for the recipe, in one word")
    parser.add_argument("--output_dir", type=Path, default=Path("out/scaling"))
    arguments = parser.parse_args()
    if arguments.steps % window(arguments.steps):  # the last line would be of fewer steps than the others
        parser.error(f"--steps {arguments.steps}: give a multiple of 3")
    if any(arguments.links) and (
        reason := "links of other machines are their own" if arguments.hosts else links.why_not()
    ):
        parser.error(f"--links {' '.join(f'{link:g}' for link in arguments.links)}: {reason}; use --links 0")
    if arguments.strategy == "dp":
        import torch

        arguments.variants, needed = ["plain", "data_parallel"], max(2, *arguments.processes)
        if (there := torch.cuda.device_count()) < needed:
            print(f"skipped: --strategy dp compares on {needed} GPUs, and this machine has {there}")
            return
    folder = arguments.output_dir.resolve() / "runs"
    if folder.exists():
        parser.error(f"{folder} exists: name a fresh --output_dir")
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, which removes links and processes
    arguments.files = data_files(arguments.recipe, folder)
    found = []
    combinations = list(product(arguments.processes, arguments.links, arguments.variants))
    for repeat in range(arguments.repeats):
        first = repeat % len(combinations)  # another one begins each round
        for processes, link, variant in combinations[first:] + combinations[:first]:
            output = folder / f"{variant}-{processes}-{link:g}-{repeat}"
            figures = train(arguments, processes, link, variant, output)
            found.append({"processes": processes, "link_mbit": link, "variant": variant, **figures})
            rate, share = figures["samples_per_second"], figures["communication_share"]
            print(f"{output.name:28} {rate:9.1f} samples/s, communication {share:.0%}", flush=True)
    found.sort(key=lambda r: combinations.index((r["processes"], r["link_mbit"], r["variant"])))
    about = {"machine": machine(max(arguments.processes)), "command": shlex.join(["python", *sys.argv])}
    rows = [row | about for row in summarize(found)]
    (arguments.output_dir / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.output_dir / "scaling.md").write_text(table(rows, about))
    draw(rows, arguments.output_dir / "scaling.png")
    print(table(rows, about))


if __name__ == "__main__":
    main()
