"""Kill a run at random instants and start it again: it ends as if nothing had happened (docs/checkpoints.md).

    python tests/campaigns/kills.py --kills 200 --processes 2

A victim is the launcher, one of the training processes, or a process that one of these has started (the checkpoint
writer, a loader worker). Whatever is left of the launch is killed with it, as a scheduler would, and the same command
is started again, until the run has finished; then the next run begins, until so many kills are done.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
from disturbed import exported, last_step, wait_until

INTERVAL = 10  # steps between checkpoints
FLAGS = [
    *(*runs.TINY, "--logging_steps", 1, "--eval_steps", 40),
    *("--checkpointing_steps", INTERVAL, "--save_total_limit", 2, "--dataloader_num_workers", 1),
]
WHEN = ("start", "step", "save", "late in a save")  # evaluation and rotation are met by the random instants after these
VICTIMS = ("launcher", "training process", "process of a training process")


@dataclass
class Tally:
    """What a campaign has seen."""

    kills: dict[tuple[str, str], int] = field(default_factory=dict)  # by (when, victim)
    runs: int = 0
    most_repeated: int = 0  # steps
    slowest_recovery: float = 0.0  # seconds from a start to the first new step

    def table(self) -> str:
        """The kills by instant and victim, and the worst that was seen, as Markdown."""
        rows = [f"| killed | {' | '.join(VICTIMS)} |", "|---|" + "---:|" * len(VICTIMS)]
        rows += [f"| {when} | {' | '.join(str(self.kills.get((when, v), 0)) for v in VICTIMS)} |" for when in WHEN]
        return "\n".join(
            [
                *rows,
                "",
                f"{sum(self.kills.values())} kills in {self.runs} runs; every run ended with the weights of the "
                f"uninterrupted one, byte for byte; at most {self.most_repeated} steps were repeated, a checkpoint "
                f"every {INTERVAL}; at most {self.slowest_recovery:.1f} s from a start to its first new step",
            ]
        )


def command(processes, flags, output):
    """The launch of a run."""
    return [*runs.torchrun(processes, runs.ROOT / "recipes/nlp.py"), *FLAGS, *flags, "--output_dir", output]


def victim(launcher, kind):
    """The process to kill, or the nearest one there is of the kinds before it."""
    trainers = launcher.children()
    found = {
        "launcher": [launcher],
        "training process": trainers,
        "process of a training process": [child for trainer in trainers for child in trainer.children(recursive=True)],
    }
    for choice in VICTIMS[VICTIMS.index(kind) :: -1]:
        if found[choice]:
            return random.choice(found[choice]), choice
    raise AssertionError


def start_and_kill(processes, flags, output, tally, most):
    """Start the run, kill it at a random instant, but not more than so often: True if it has finished before."""
    before, started = last_step(output), time.monotonic()
    newest = max((int(p.name[5:]) for p in output.glob("checkpoints/step_*") if p.name[5:].isdigit()), default=0)
    tally.most_repeated = max(tally.most_repeated, before - newest)
    assert before - newest < 2 * INTERVAL + 1, f"{before - newest} steps are lost"
    process = runs.start(command(processes, flags, output), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    left = []
    try:
        when = random.choices(WHEN, (2, 3, 3, 2))[0]
        if sum(tally.kills.values()) == most:
            alive = wait_until(lambda: False, process, seconds=600)
        elif when == "start":
            instant = random.uniform(0, 7)
            alive = wait_until(lambda: time.monotonic() - started > instant, process)
        else:
            goal = newest + 1 + random.randrange(3 * INTERVAL)
            alive = wait_until(lambda: last_step(output) >= goal, process)
            tally.slowest_recovery = max(tally.slowest_recovery, time.monotonic() - started)
            if alive and "save" in when:
                alive = wait_until(lambda: any(output.glob("checkpoints/*.partial*")), process)
                time.sleep(random.uniform(0, 0.05) if when == "late in a save" else random.uniform(0, 0.005))
        if not alive:
            said = "".join(process.communicate())
            assert process.returncode == 0, said[-3000:]
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(process.pid).children(recursive=True)
            chosen, kind = victim(psutil.Process(process.pid), random.choice(VICTIMS))
            chosen.kill()
            tally.kills[when, kind] = tally.kills.get((when, kind), 0) + 1
            time.sleep(random.uniform(0, 0.5))  # the others end by themselves, or go on without it
        return False
    finally:
        for child in left:  # training processes have sessions of their own, and outlive their launcher
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        runs.end(process)


def campaign(kills, processes, folder, texts, seed=0, steps=240):
    """So many kills of runs of so many steps; raises AssertionError where the promise does not hold."""
    random.seed(seed)
    flags = [*texts, "--max_train_steps", steps]
    whole = command(processes, flags, folder / "whole")
    runs.succeed(whole, timeout=900, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    tally = Tally()
    while sum(tally.kills.values()) < kills:
        output = folder / f"run-{tally.runs}"
        while not start_and_kill(processes, flags, output, tally, kills):
            so_far = f"{sum(tally.kills.values())} kills, run {tally.runs}, step {last_step(output)}"
            print(so_far, file=sys.stderr, flush=True)
        assert exported(output) == exported(folder / "whole"), f"{output} ended with other weights"
        trained = [line["step"] for line in runs.training_lines(output)]
        assert trained == [line["step"] for line in runs.training_lines(folder / "whole")]
        tally.runs += 1
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = runs.write_texts(Path(folder))
        print(campaign(given.kills, given.processes, Path(folder), texts, given.seed).table())
