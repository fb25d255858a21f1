"""Kill a run at random instants and resume it: the result equals that of an uninterrupted run (docs/checkpoints.md).

    python tests/campaigns/kills.py --kills 200 --processes 2 --recipe nlp

A victim is the launcher, one of the training processes, or a process that one of these has started (a loader
worker). The rest of the launch is killed soon after, as a scheduler would, and the same command is
started again, until the run has finished. Then the next run begins, until the number of kills is reached.
"""

import contextlib
import random
import sys
import time
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
import toy_data
from disturbed import Row, Table, last_step, run_as_script, wait_until

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


def command(processes, recipe, flags, output):
    """The command that launches a run."""
    launcher = runs.torchrun(processes, runs.ROOT / f"recipes/{recipe}.py")
    return [*launcher, *FLAGS, *flags, "--expect_processes", processes, "--output_dir", output]


def victim(launcher):
    """A process to kill, and its kind."""
    trainers = launcher.children()
    of_trainers = [child for trainer in trainers for child in trainer.children(recursive=True)]
    found = {"launcher": [launcher], "training process": trainers, "process of a training process": of_trainers}
    kind = random.choice([kind for kind in found if found[kind]])
    return random.choice(found[kind]), kind


def start_and_kill(launch, output, table, most, last):
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
        if kills_of(table) == most:
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
        row = Row()  # of a process that has just ended by itself
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(process.pid).children(recursive=True)
            chosen, kind = victim(psutil.Process(process.pid))
            chosen.kill()
            row = table.rows.setdefault(f"{when}: {kind}", Row())
            row.tried += 1
            time.sleep(random.uniform(0, 0.5))  # the other processes end by themselves or continue
        return row
    finally:
        for child in left:  # training processes have sessions of their own and outlive their launcher
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        runs.end(process)


def kills_of(table):
    return sum(row.tried for row in table.rows.values())


def campaign(folder, kills, processes, recipe="nlp", seed=0, steps=240):
    """Kill runs of `steps` steps until there are `kills` kills. A run with other weights or steps is a failure.

    After a failure the next run begins; after five, the campaign ends.
    """
    random.seed(seed)
    data = toy_data.write_data(recipe, runs.write_texts(folder), folder)
    launch = partial(command, processes, recipe, [*data, "--max_train_steps", steps])
    runs.succeed(launch(folder / "whole"), timeout=900, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    table, count = Table("killed in"), 0
    while kills_of(table) < kills and len(table.failures) < 5:
        output, rows = folder / f"run-{count}", []
        count += 1
        try:
            while row := start_and_kill(launch, output, table, kills, rows[-1] if rows else None):
                rows.append(row)
                print(f"{kills_of(table)} kills, run {count}, step {last_step(output)}", file=sys.stderr, flush=True)
            assert runs.exported(output) == runs.exported(folder / "whole"), f"{output} ended with other weights"
            trained = [line["step"] for line in runs.training_lines(output)]
            assert trained == [line["step"] for line in runs.training_lines(folder / "whole")]
        except AssertionError as error:
            table.failures.append(str(error))
            print(f"FAILED: {error}", file=sys.stderr, flush=True)
            continue
        for row in rows:
            row.survived += 1
    ended = f"{kills_of(table)} kills in {count} runs, of which {count - len(table.failures)} ended with the weights"
    table.remark = f"{ended} of the uninterrupted one, byte for byte; a checkpoint every {INTERVAL} steps."
    return table


if __name__ == "__main__":
    run_as_script(__doc__, campaign, kills=200, processes=2, recipe="nlp", seed=0)
