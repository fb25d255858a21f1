"""Kill a run at random instants and resume it: the result equals that of an uninterrupted run (docs/checkpoints.md).

    python tests/campaigns/kills.py --kills 200 --processes 2 --recipe nlp

A victim is the launcher, one of the training processes, or a process that one of these has started (a loader
worker). The rest of the launch is killed soon after, as a scheduler would, and the same command is
started again, until the run has finished. Then the next run begins, until the number of kills is reached.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
import toy_data
from disturbed import exported, last_step, wait_until

INTERVAL, EVALUATION, LIMIT = 10, 40, 2  # steps between checkpoints, steps between evaluations, checkpoints kept
FLAGS = [
    *(*runs.TINY, "--logging_steps", 1, "--eval_steps", EVALUATION),
    *("--checkpointing_steps", INTERVAL, "--save_total_limit", LIMIT, "--dataloader_num_workers", 1),
]
WHEN = {  # instant: (relative frequency, largest random delay in seconds)
    "start": (2, 0.0),
    "step": (3, 0.0),
    "evaluation": (2, 0.03),
    "save": (3, 0.005),
    "late in a save": (2, 0.05),
    "rotation": (2, 0.001),
}
VICTIMS = ("launcher", "training process", "process of a training process")


@dataclass
class Row:
    """The results of the kills at one kind of instant."""

    victims: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    survived: int = 0  # kills in runs that ended with the weights of the uninterrupted one
    repeated: int = 0  # most steps that were repeated after one kill
    seconds: float = 0.0  # longest time from the next start to the first new step


@dataclass
class Tally:
    """The results of a campaign."""

    rows: dict[str, Row] = field(default_factory=lambda: {when: Row() for when in WHEN})
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self):
        return sum(sum(row.victims.values()) for row in self.rows.values())

    def table(self):
        """The kills by instant and victim, how many the runs survived, and the worst costs, as Markdown."""
        lines = [f"| killed in | {' | '.join(VICTIMS)} | tried | survived | worst steps repeated | worst recovery, s |"]
        lines += ["|---|" + "---:|" * (len(VICTIMS) + 4)]
        for when, row in self.rows.items():
            figures = [*row.victims.values(), sum(row.victims.values()), row.survived, row.repeated]
            lines.append(f"| {when} | {' | '.join(map(str, figures))} | {row.seconds:.1f} |")
        ended = f"{self.kills} kills in {self.runs} runs, of which {self.runs - len(self.failures)} ended with the "
        lines += ["", f"{ended}weights of the uninterrupted one, byte for byte; a checkpoint every {INTERVAL} steps."]
        return "\n".join(lines)


def command(processes, recipe, flags, output):
    """The command that launches a run."""
    launcher = runs.torchrun(processes, runs.ROOT / f"recipes/{recipe}.py")
    return [*launcher, *FLAGS, *flags, "--expect_processes", processes, "--output_dir", output]


def victim(launcher, kind):
    """The process to kill; without one of this `kind`, one of the nearest kind before it in VICTIMS."""
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


def start_and_kill(launch, output, tally, most, last):
    """Start the run by the command `launch(output)`; kill it at a random instant, unless there have been `most` kills.

    `last` is the row of the kill before this start, or None. Returns the row of this kill, or None if the run has
    finished first.
    """
    before, started = last_step(output), time.monotonic()
    saved = output / "checkpoints"
    newest = max((int(path.name[5:]) for path in saved.glob("step_*") if path.name[5:].isdigit()), default=0)
    if last:
        last.repeated = max(last.repeated, before - newest)
    assert before - newest < 2 * INTERVAL + 1, f"{before - newest} steps are lost"
    process = runs.start(launch(output), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    goal = before + 1 + random.randrange(3 * INTERVAL)
    instants = {
        "step": lambda: True,
        "evaluation": lambda: last_step(output) % EVALUATION == 0,
        "save": lambda: any(saved.glob("*.partial*")),
        "late in a save": lambda: any(saved.glob("*.partial*")),
        "rotation": lambda: len([*saved.glob("step_????????")]) > LIMIT,
    }
    left = []
    try:
        (when,) = random.choices([*WHEN], [often for often, _ in WHEN.values()])
        if tally.kills == most:
            alive = wait_until(lambda: False, process, seconds=600)
        elif when == "start":
            instant = random.uniform(0, 7)
            alive = wait_until(lambda: time.monotonic() - started > instant, process)
        else:
            alive = wait_until(lambda: last_step(output) > before, process)
            if last and alive:
                last.seconds = max(last.seconds, time.monotonic() - started)
            alive = alive and wait_until(lambda: last_step(output) >= goal and instants[when](), process)
            time.sleep(random.uniform(0, WHEN[when][1]))
        if not alive:
            printed = "".join(process.communicate())
            assert process.returncode == 0, printed[-3000:]
            return None
        row = tally.rows[when]
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(process.pid).children(recursive=True)
            chosen, kind = victim(psutil.Process(process.pid), random.choice(VICTIMS))
            chosen.kill()
            row.victims[kind] += 1
            time.sleep(random.uniform(0, 0.5))  # the other processes end by themselves or continue
        return row
    finally:
        for child in left:  # training processes have sessions of their own and outlive their launcher
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        runs.end(process)


def campaign(kills, processes, folder, recipe, data, seed=0, steps=240):
    """Kill runs of `steps` steps until there are `kills` kills. A run with other weights or steps is a failure.

    After a failure the next run begins; after five, the campaign ends.
    """
    random.seed(seed)
    launch = partial(command, processes, recipe, [*data, "--max_train_steps", steps])
    runs.succeed(launch(folder / "whole"), timeout=900, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    tally = Tally()
    while tally.kills < kills and len(tally.failures) < 5:
        output, rows = folder / f"run-{tally.runs}", []
        tally.runs += 1
        try:
            while row := start_and_kill(launch, output, tally, kills, rows[-1] if rows else None):
                rows.append(row)
                so_far = f"{tally.kills} kills, run {tally.runs}, step {last_step(output)}"
                print(so_far, file=sys.stderr, flush=True)
            assert exported(output) == exported(folder / "whole"), f"{output} ended with other weights"
            trained = [line["step"] for line in runs.training_lines(output)]
            assert trained == [line["step"] for line in runs.training_lines(folder / "whole")]
        except AssertionError as error:
            tally.failures.append(str(error))
            print(f"FAILED: {error}", file=sys.stderr, flush=True)
            continue
        for row in rows:
            row.survived += 1
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--recipe", default="nlp", choices=toy_data.RECIPES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = toy_data.write_data(given.recipe, runs.write_texts(Path(folder)), Path(folder))
        tally = campaign(given.kills, given.processes, Path(folder), given.recipe, data, given.seed)
    print(tally.table())
    sys.exit(bool(tally.failures))
