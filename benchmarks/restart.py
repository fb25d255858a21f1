"""Measure what the death of one process costs a run under torchrun: seconds of each phase until its work is done again.

    python benchmarks/restart.py --rounds 3 --output_dir out/restart

In each round, `recipes/nlp.py` trains in 2, 4 and 8 processes of this machine over gloo, and one of them is killed some
steps after a checkpoint. torchrun ends the others and starts the group again. Phases; each ends with the last process:

    detect   until the other processes have ended
    restart  until the new processes have imported, connected, verified the checkpoint, and made the data and the model
    reload   until they have loaded the checkpoint
    redo     until the run has logged the step again that it had logged last

Writes restart.json into the output folder.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, rounds

KILLED_AT, SAVED_EVERY = 30, 20
FLAGS = {"max_train_steps": 10**6, "eval_steps": 10**6, "logging_steps": 1, "checkpointing_steps": SAVED_EVERY}
FLAGS |= {"micro_batches_per_step": 8}  # on any number of processes that is measured
PHASES = ("detect", "restart", "reload", "redo")


def work(events: Path, recipe: Path) -> None:
    """Train as a process of a launch, and note its pid, and from when until when it loaded the checkpoint."""
    from shared.checkpoints.saving import Saver
    from shared.run import command, recipes

    file, load = events / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}.json", Saver.load
    file.write_text(json.dumps({"pid": os.getpid()}))

    def timed_load(*arguments: Any) -> None:
        started = time.time()
        load(*arguments)
        file.write_text(json.dumps({"started": started, "loaded": time.time()}))

    Saver.load = timed_load
    module = recipes.load_recipe(recipe)
    command.run(module.main, module.Config)


def measure(processes: int, folder: Path) -> dict[str, float]:
    """Train, kill the last process, and return the seconds of each phase."""
    events, metrics, log = folder / "events", folder / "run/metrics.jsonl", folder / "log.txt"
    events.mkdir(parents=True)

    def last_step() -> int:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def noted(start: int) -> list[dict[str, float]]:
        return [json.loads(file.read_text()) for file in events.glob(f"{start}-*.json")]

    def wait(condition: Callable[[], bool]) -> float:
        while not condition():
            if agent.poll() is not None:
                raise RuntimeError(f"torchrun ended with {agent.returncode}:\n{log.read_text()[-3000:]}")
            time.sleep(0.005)
        return time.time()

    words = [*launching.torchrun(processes), "--max-restarts", 1, __file__, "work", events, "recipes/nlp.py"]
    words = [str(word) for word in (*words, *launching.flag_words(FLAGS), "--output_dir", metrics.parent)]
    with log.open("w") as file:
        agent = subprocess.Popen(words, cwd=launching.ROOT, env=launching.environment(), stdout=file, stderr=file)
    try:
        wait(lambda: last_step() >= KILLED_AT)
        pids = [int(each["pid"]) for each in noted(0)]
        assert len(pids) == processes
        killed = time.time()
        os.kill(pids[-1], signal.SIGKILL)
        ended = wait(lambda: not any(map(psutil.pid_exists, pids)))
        reached, old = last_step(), metrics.stat().st_ino
        wait(lambda: metrics.stat().st_ino != old)  # all have loaded; the lines after the checkpoint are removed
        done = wait(lambda: last_step() >= reached)
        new = noted(1)
    finally:
        agent.terminate()
        agent.wait()
    started, loaded = (max(each[name] for each in new) for name in ("started", "loaded"))
    times = (ended - killed, started - ended, loaded - started, done - loaded)
    return {**dict(zip(PHASES, times, strict=True)), "all": done - killed, "steps": reached % SAVED_EVERY}


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/restart")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    before, names = os.getloadavg(), [str(number) for number in arguments.processes]
    rows = rounds.take_turns(names, arguments.rounds, lambda name, n: measure(int(name), folder / f"{name}-{n}"))
    of = {name: [row for row in rows if row["contestant"] == name] for name in names}
    medians = {n: {p: statistics.median(row[p] for row in own) for p in (*PHASES, "all")} for n, own in of.items()}
    load = {"before": before, "after": os.getloadavg()}
    about = {"machine": rounds.machine(max(arguments.processes)), "command": rounds.command(), "load_average": load}
    report = json.dumps(about | {"median_seconds": medians, "rows": rows}, indent=1)
    (arguments.output_dir / "restart.json").write_text(report + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        events, recipe = Path(sys.argv[2]), Path(sys.argv[3])
        sys.argv = sys.argv[3:]
        work(events, recipe)
    else:
        main()
