"""Start scripts under torchrun, turn flags into words of a command line, and read the metrics that a run leaves."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
HARNESS = ROOT / "benchmarks/harness"


def python_path() -> str:
    """PYTHONPATH with this repository first; what was on it stays, because packages may come from there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment(threads: int = 1) -> dict[str, str]:
    """The environment of a benchmark's process: so many threads, no GPU, no network."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_MIXED", "WANDB_"))}
    return inherited | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(),
    }


def launch(processes: int, log: Path, *script: object) -> float:
    """Run a script under torchrun until it ends: `run`, of which it returns the peak memory."""
    return run(log, *torchrun(processes), *script)["peak_rss_mib"]


def torchrun(processes: int) -> list[object]:
    """The command line that starts a script in `processes` processes, up to the script."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", port]


def run(log: Path, *words: object, threads: int = 1) -> dict[str, float]:
    """Run a command until it ends.

    Args:
        log: file for everything that it prints.
        words: the command.
        threads: of a process.

    Returns:
        `processor_seconds` (user and system) of the process and its children, `wall_seconds`, and the peak memory of
        the largest of them, `peak_rss_mib`.

    Raises:
        RuntimeError: the command failed; the message ends with its last lines.
    """
    command, started = [str(word) for word in words], time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(threads))
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return {
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.perf_counter() - started,
        "peak_rss_mib": usage.ru_maxrss / 1024,
    }


def between_marks(text: str, start: str, end: str, tables: str) -> str:
    """The text of a page with `tables` instead of what stands between the lines `start` and `end`."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    assert after, f"the page lacks the line {start} or the line {end}"
    return f"{before}{start}\n\n{tables}\n\n{end}{after}"


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """`{"seed": 1}` as words of a command line: `["--seed", "1"]`."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def logged_steps(output: Path, warmup: int) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that have a loss, without the first `warmup` of them."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line][warmup:]
