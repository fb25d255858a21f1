"""End a run by a signal at each point of its life and resume it: the result equals an uninterrupted run's.

    python tests/campaigns/signals.py --processes 2

SIGTERM comes while the processes read their data, make the first pass, are in a step, a save or an evaluation: to one
of them, to the launcher, to all of these at once, or to the loader processes and the checkpoint writer too. Each has to
end with 143 and leave PREEMPTED, and the same command has to go on to the weights of the uninterrupted run.
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

POINTS = {  # what is said of it, and the steps of which one may be saved
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
    """Tell a run to end, and start it again."""
    output = folder / "run"
    with Launch(processes, flags, output, folder / "first", [point]) as first:
        first.wait_for(point)
        for process in TARGETS[target](first):
            with contextlib.suppress(psutil.NoSuchProcess):  # the one before it has taken it along
                process.send_signal(signal.SIGTERM)
        first.go(point)
        code, said = first.end()
        assert code != 0
        codes = {note["rank"]: note["exit"] for note in first.notes("exit")}
        assert codes == dict.fromkeys(range(processes), 143), f"exit codes {codes}: {said[-3000:]}"
    assert (output / "PREEMPTED").exists(), said[-3000:]
    left = json.loads((output / "PREEMPTED").read_text())
    assert left["step"] in POINTS[point][1], left
    with Launch(processes, flags, output, folder / "second") as second:
        second.succeed(row)
    assert_same(output, whole)


def campaign(folder, processes, points=POINTS, targets=TARGETS):
    """Every signal at every point."""
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
