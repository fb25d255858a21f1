"""Predict step time and efficiency on 8 to 4,096 processes, from a measured computation and the figures of a link.

    python benchmarks/predict_scaling.py --token_seconds 5e-5 --tokens 4096 --gradient_bytes 5.6e6 --bandwidth 1.25e9
    python benchmarks/predict_scaling.py --measured out/links/scaling.json --gradient_bytes 5.6e6 --late_bytes 4.5e6
    python benchmarks/predict_scaling.py --sleep 0.2 --processes 3 --links 1000 300 100 --gradient_bytes 5.6e6

The first command predicts. The second compares the model with what scaling.py measured on limited links. The third
compares it with steps whose computation is a sleep.

harness/scaling_model.py has the model. With several ranks per node, there is a ring inside each node and then a ring
over the nodes. Writes predict_scaling.json and predict_scaling.md into the output folder.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import limited_links, scaling_model
from benchmarks.harness.process_group import run_group
from benchmarks.harness.rounds import command, machine


def network_of(arguments: argparse.Namespace) -> scaling_model.Network:
    """The links that the flags describe."""
    return scaling_model.Network(
        bandwidth=arguments.bandwidth,
        latency=arguments.latency,
        ranks_per_machine=arguments.ranks_per_node,
        machine_latency=arguments.node_latency,
        machine_bandwidth=arguments.node_bandwidth,
    )


def work_of(arguments: argparse.Namespace, computation: float) -> scaling_model.Work:
    """What a process does in a step, if its computation takes `computation` seconds."""
    late, micro_batches = arguments.late_bytes, arguments.micro_batches
    return scaling_model.Work(computation, arguments.gradient_bytes, late, micro_batches)


def predict(ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One row of the table."""
    work = work_of(arguments, arguments.token_seconds * arguments.tokens)
    row = scaling_model.predict(ranks, work, network_of(arguments))
    return row | {"tokens_per_second": ranks * arguments.tokens / row["step_seconds"]}


def check(measured: list[dict[str, Any]], link: argparse.Namespace) -> list[dict[str, float]]:
    """Compare the prediction with rows of scaling.py on limited links; the row without a limit gives the computation.

    In that row a process also waits for the other one and for copies. This overlaps with the transfers on a slower
    link, so the longer of the two counts.
    """
    rows = []
    for row in measured:
        same = [r for r in measured if (r["processes"], r["variant"]) == (row["processes"], row["variant"])]
        free = [r for r in same if not r["link_mbit"]]
        if not row["link_mbit"] or not free or row["processes"] == 1:
            continue
        link.bandwidth = limited_links.GOODPUT * row["link_mbit"] * 1e6 / 8
        waiting = free[0]["step_seconds"] * free[0]["communication_share"]
        computation = free[0]["step_seconds"] - waiting
        work = work_of(link, computation)
        exposed = scaling_model.exposed_seconds(row["processes"], work.backward, work, network_of(link))
        rows.append(compared(row, computation + max(waiting, exposed), row["step_seconds"]))
    return rows


def compared(row: dict[str, Any], predicted: float, measured: float) -> dict[str, float]:
    """A row with a prediction, a measurement, and the relative error."""
    place = {"processes": row["processes"], "link_mbit": row["link_mbit"]}
    return place | {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def sleep_and_reduce(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measure steps that sleep and then sum their gradients, on each link, and compare them with the prediction."""
    rows = []
    folder = arguments.output_dir.resolve() / "turns"
    folder.mkdir(exist_ok=True)
    for megabits in arguments.links:
        times = []
        for repeat in range(arguments.repeats):
            result = folder / f"{megabits:g}-{repeat}.json"
            job = [arguments.sleep, arguments.gradient_bytes, result]
            words = [str(word) for word in (sys.executable, Path(__file__).resolve(), "--worker", *job)]
            with limited_links.limited(arguments.processes, megabits) as places:
                run_group(words, arguments.processes, places, None, result.with_suffix(".log"))
            times.append(json.loads(result.read_text()))
        arguments.bandwidth, arguments.late_bytes = limited_links.GOODPUT * megabits * 1e6 / 8, arguments.gradient_bytes
        work, network = work_of(arguments, arguments.sleep), network_of(arguments)
        predicted = arguments.sleep + scaling_model.exposed_seconds(arguments.processes, 0.0, work, network)
        row = {"processes": arguments.processes, "link_mbit": megabits}
        rows.append(compared(row, predicted, statistics.median(times)))
    return rows


def worker(sleep: float, gradient_bytes: float, result: Path) -> None:
    """One process of `sleep_and_reduce`; rank 0 writes the median of five steps after one of warm-up."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gradient = torch.ones(int(gradient_bytes) // 4)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        time.sleep(sleep)
        dist.all_reduce(gradient)
        times.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(statistics.median(times[1:])))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, float]], about: dict[str, Any]) -> str:
    """The rows as Markdown, with the machine and the command."""
    lines = [f"{about['machine']['cpu']}, {about['machine']['date'][:10]}. `{about['command']}`", ""]
    if rows and "error" in rows[0]:
        lines += ["| processes | link | predicted step (s) | measured step (s) | error |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {r['processes']} | {r['link_mbit']:g} Mbit/s | {r['predicted']:.3f} | {r['measured']:.3f} | "
            f"{r['error']:+.0%} |"
            for r in rows
        ]
    else:
        lines += ["| processes | step (s) | exposed (s) | efficiency | tokens/s |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {r['processes']:,} | {r['step_seconds']:.4f} | {r['exposed_seconds']:.4f} | {r['efficiency']:.0%} | "
            f"{r['tokens_per_second']:,.0f} |"
            for r in rows
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gradient_bytes", type=float, required=True, help="gradients of all parameters: 4 bytes per parameter"
    )
    parser.add_argument("--late_bytes", type=float, default=0.0, help="bytes of them that come with the last gradient")
    parser.add_argument("--token_seconds", type=float, help="measured seconds of computation per token")
    parser.add_argument("--tokens", type=float, help="tokens per process and step")
    parser.add_argument(
        "--micro_batches", type=int, default=1, help="per process and step; transfers overlap with the last one"
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of one message between nodes")
    parser.add_argument("--bandwidth", type=float, help="bytes per second out of a node")
    parser.add_argument("--ranks_per_node", type=int, default=1)
    parser.add_argument("--node_latency", type=float, default=0.0, help="seconds of one message inside a node")
    parser.add_argument("--node_bandwidth", type=float, default=float("inf"), help="bytes per second inside a node")
    parser.add_argument("--measured", type=Path, help="a scaling.json to compare with the prediction")
    parser.add_argument("--sleep", type=float, help="measure steps that sleep so many seconds instead of computing")
    parser.add_argument("--processes", type=int, default=3, help="processes, with --sleep")
    parser.add_argument(
        "--links", type=float, nargs="+", default=[1000, 300, 100], help="Mbit/s of the links, with --sleep"
    )
    parser.add_argument("--repeats", type=int, default=5, help="repeats, with --sleep")
    parser.add_argument("--output_dir", type=Path, default=Path("out/predict_scaling"))
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    if arguments.sleep is not None:
        if reason := limited_links.why_not():
            parser.error(f"--links: {reason}")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception removes links and processes
        rows = sleep_and_reduce(arguments)
    elif arguments.measured:
        rows = check(json.loads(arguments.measured.read_text()), arguments)
    else:
        if None in (arguments.token_seconds, arguments.tokens, arguments.bandwidth):
            parser.error("a prediction needs --token_seconds, --tokens and --bandwidth")
        rows = [predict(count, arguments) for count in scaling_model.COUNTS]
    about = {"machine": machine(os.cpu_count() or 1), "command": command()}
    (arguments.output_dir / "predict_scaling.json").write_text(
        json.dumps([row | about for row in rows], indent=1) + "\n"
    )
    (arguments.output_dir / "predict_scaling.md").write_text(table(rows, about))
    print(table(rows, about))


if __name__ == "__main__":
    main()
