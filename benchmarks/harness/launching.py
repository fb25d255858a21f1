"""Start scripts under torchrun, turn flags into words of a command line, and read the metrics that a run leaves."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent.parent
HARNESS = ROOT / "benchmarks/harness"


def python_path() -> str:
    """PYTHONPATH with this repository first; what was on it stays, because packages may come from there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment() -> dict[str, str]:
    """The environment of a benchmark's process: one thread, no GPU, no network."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_MIXED", "WANDB_"))}
    return inherited | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(),
    }


def launch(processes: int, log: Path, *script: object) -> float:
    """Run a script under torchrun until it ends.

    Args:
        processes: how many torchrun starts.
        log: file for everything that they print.
        script: the script and its flags.

    Returns:
        The peak memory of the largest process, in MiB.

    Raises:
        RuntimeError: the script failed; the message ends with its last lines.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", port]
    with log.open("w") as output:
        command = [str(word) for word in (sys.executable, *launcher, *script)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss / 1024


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """`{"seed": 1}` as words of a command line: `["--seed", "1"]`."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def logged_steps(output: Path, warmup: int) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that have a loss, without the first `warmup` of them."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line][warmup:]


def run_job(file: Path, train: Callable[[SimpleNamespace], Mapping[str, Any]]) -> None:
    """Train the job in `file` as one process of a launch; the main process writes the figures into `job.result`."""
    import torch.distributed as dist

    job = SimpleNamespace(**json.loads(file.read_text()))
    result = train(job)
    if os.environ["RANK"] == "0":
        Path(job.result).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
