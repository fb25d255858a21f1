"""End a run by a signal at each of its stages and resume it: the result equals that of an uninterrupted run.

    python tests/campaigns/signals.py --processes 2

SIGTERM is sent while the processes read their data, or are in the first pass, a step, a save or an evaluation. It goes
to one training process, to the launcher, to the launcher and all training processes, or to these and their children
(loader workers). Each training process must exit with 143, and the run must write PREEMPTED.
The same command must then resume the run and end with the weights of an uninterrupted one.
"""

import contextlib
import json
import signal
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
from disturbed import Launch, Table, assert_same, flags_of, run_as_script

POINTS = {  # point: (name in the table, steps that the run may save)
    "data": ("start, reading the data", {None}),
    "first pass": ("start, the first pass", {None}),
    "step-6": ("a step", {6, 7, 8}),
    "save-8": ("a save", {8, 9, 10}),
    "evaluation-12": ("an evaluation", {12}),
}
TARGETS = {
    "one process": lambda launch: launch.trainers()[-1:],
    "the launcher": lambda launch: launch.tree()[:1],
    "launcher and processes": lambda launch: [*launch.tree()[:1], *launch.trainers()],
    "their children too": lambda launch: launch.tree(),
}


def interrupt(point, target, processes, flags, whole, folder, row):
    """Send SIGTERM to a run at a point, and resume the run."""
    output = folder / "run"
    with Launch(processes, flags, output, folder / "first", [point]) as first:
        first.wait_for(point)
        for process in TARGETS[target](first):
            with contextlib.suppress(psutil.NoSuchProcess):  # the signal to the process before may have ended this one
                process.send_signal(signal.SIGTERM)
        first.go(point)
        code, printed = first.end()
        assert code != 0
        codes = {note["rank"]: note["exit"] for note in first.notes("exit")}
        assert codes == dict.fromkeys(range(processes), 143), f"exit codes {codes}: {printed[-3000:]}"
    assert (output / "PREEMPTED").exists(), printed[-3000:]
    left = json.loads((output / "PREEMPTED").read_text())
    assert left["step"] in POINTS[point][1], left
    with Launch(processes, flags, output, folder / "second") as second:
        second.succeed(row)
    assert_same(output, whole)


def campaign(folder, processes, points=POINTS, targets=TARGETS):
    """Interrupt a run at every point with every target of the signal."""
    texts = runs.write_texts(folder)
    flags = flags_of(texts, runs.write_bert_with_dropout(folder / "bert", texts))
    with Launch(processes, flags, folder / "whole", folder / "notes") as whole:
        whole.succeed()
    table = Table("SIGTERM during")
    for point in points:
        for target in targets:
            with table.case(POINTS[point][0], target) as row:
                interrupt(point, target, processes, flags, folder / "whole", folder / f"{point}-{target}", row)
    return table


if __name__ == "__main__":
    run_as_script(__doc__, campaign, processes=2)
