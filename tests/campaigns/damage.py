"""Damage the newest checkpoint, put files next to it, fill the disk, start two runs together: nothing is lost.

    python tests/campaigns/damage.py --processes 2

Each file of the newest checkpoint is cut short, or has one bit flipped, one file at a time. Links, foreign files and
folders, and unreadable folders lie beside the checkpoints, some with names that later checkpoints need. A file system
in memory has no space left, or room for only some files of a checkpoint. Every run must end with the weights of an
undisturbed one. A run that has ended early is started again with the same command.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
from disturbed import INTERVAL, STEPS, Launch, Table, assert_same, flags_of, run_as_script

from shared.checkpoints import resuming

STOPPED, NEWEST = 2 * INTERVAL + 3, 2 * INTERVAL  # the step of the kill, and that of the newest checkpoint


DAMAGES = {"a file cut short": runs.truncate, "a bit flipped": runs.flip_a_bit}


def named(step):
    return f"step_{step:08d}"


def foreign_folders(folder):
    """Put foreign folders, and a file with the name of a later checkpoint; return the files that must stay."""
    for name in ("best", f"{named(12)}.partial-mine", "step_final"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    (folder / named(16)).write_text("mine")
    return [folder / name / "notes.txt" for name in ("best", f"{named(12)}.partial-mine", "step_final")]


def links(folder):
    """Put links with names of later checkpoints, complete and partial; one target is missing. Return what must stay."""
    kept = folder.parent / "kept"
    shutil.copytree(folder / named(INTERVAL), kept)
    (folder / named(12)).symlink_to(kept)
    (folder / named(24)).symlink_to("nowhere")
    (folder / f"{named(20)}.partial-0123abcd").symlink_to(kept)
    return [*kept.iterdir(), folder / f"{named(20)}.partial-0123abcd"]


def unreadable_folders(folder):
    """Put unreadable folders with the names of a later, an old and an unfinished checkpoint; return what must stay."""
    for name in (named(16), named(1), f"{named(12)}.partial-0123abcd"):
        (folder / name).mkdir(mode=0)
    return [folder / named(1)]


def unfinished(folder):
    """Put the files that a killed save leaves. The run removes them, so none must stay."""
    shutil.copytree(folder / named(INTERVAL), folder / f"{named(12)}.partial-0123abcd")
    return []


STRAYS = {
    "folders and files of others": foreign_folders,
    "links": links,
    "unreadable folders": unreadable_folders,
    "an unfinished checkpoint": unfinished,
}


def without_root_access():
    """The words before a command that take away root's right to read everything."""
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 else []


class Scene:
    """A finished run to compare with, and one killed after two checkpoints. Each case gets a copy of the killed run."""

    def __init__(self, folder, processes):
        texts = runs.write_texts(folder)
        self.flags = flags_of(texts, runs.write_bert_with_dropout(folder / "bert", texts))
        self.folder, self.processes, self.cases = folder, processes, 0
        with self.launch(folder / "whole", folder / "notes-whole") as whole:
            whole.succeed()
        with self.launch(folder / "killed", folder / "notes-killed", [f"step-{STOPPED}"]) as killed:
            killed.wait_for(f"step-{STOPPED}")
            runs.power_off(killed.process)
        assert max(resuming.checkpoints_of(folder / "killed")) == NEWEST

    def launch(self, output, notes, pauses=(), prefix=()):
        return Launch(self.processes, self.flags, output, notes, pauses, prefix)

    def new(self):
        """A folder for a case."""
        self.cases += 1
        return self.folder / f"case-{self.cases}"

    def copy(self):
        """The folder of a case, with a copy of the killed run in `run`."""
        folder = self.new()
        shutil.copytree(self.folder / "killed", folder / "run")
        return folder

    def files(self):
        """The names of the files of a checkpoint."""
        return sorted(path.name for path in (self.folder / "killed/checkpoints" / named(NEWEST)).iterdir())


def assert_skips_damaged(scene, damage, file, row):
    """With a damaged newest checkpoint, the run resumes from the one before and replaces the damaged one."""
    folder = scene.copy()
    damage(folder / "run/checkpoints" / named(NEWEST) / file)
    with scene.launch(folder / "run", folder / "notes") as again:
        output = again.succeed(row)
    assert f"{named(NEWEST)} is skipped: " in output, output[-3000:]
    assert f"resumed from {named(NEWEST - INTERVAL)}" in output
    assert_same(folder / "run", scene.folder / "whole")
    for checkpoint in resuming.checkpoints_of(folder / "run").values():
        assert resuming.problem_with(checkpoint) is None


def assert_left_alone(scene, put, row):
    """With foreign files beside the checkpoints, the run resumes from its newest one, and the files stay."""
    folder = scene.copy()
    stay = put(folder / "run/checkpoints")
    with scene.launch(folder / "run", folder / "notes", prefix=without_root_access()) as again:
        output = again.succeed(row)
    assert f"resumed from {named(NEWEST)}" in output
    assert_same(folder / "run", scene.folder / "whole")
    assert set(resuming.checkpoints_of(folder / "run")) == {*range(INTERVAL, STEPS + 1, INTERVAL)}, output[-3000:]
    assert not [path for path in stay if not os.path.lexists(path)], output[-3000:]


def fill(folder, files_left=None, bytes_left=0):
    """Fill a file system, except for `files_left` files or `bytes_left` bytes."""
    (folder / "filler").mkdir()
    if files_left is not None:
        for number in range(os.statvfs(folder).f_ffree - files_left):
            (folder / f"filler/{number}").touch()
    else:
        space = shutil.disk_usage(folder).free - bytes_left
        (folder / "filler/bytes").write_bytes(bytes(space - space % 4096))


def beside(folder, name):
    """A folder beside `folder`, which is not on the full disk."""
    return folder.with_name(f"{folder.name}-{name}")


def assert_continues(scene, folder, _, left, reason):
    """At several saves the disk is full except for `left`. The run prints a warning at each and continues."""
    saves = range(NEWEST, NEWEST + 2 * INTERVAL * len(left), 2 * INTERVAL)  # after two in a row, the run would wait
    points = [f"step-{step - 1}" for step in range(NEWEST, NEWEST + 2 * INTERVAL * len(left), INTERVAL)]
    disks = [how for each in left for how in (each, None)]
    with scene.launch(folder / "run", beside(folder, "notes"), points) as run:
        for point, how in zip(points, disks, strict=True):
            run.wait_for(point)
            shutil.rmtree(folder / "filler", ignore_errors=True)
            if how:
                fill(folder, **how)
            run.go(point)
        output = run.succeed()
    for step in saves:
        assert f"warning: cannot save {folder}/run/checkpoints/{named(step)} ({reason}" in output, output[-3000:]
    assert_same(folder / "run", scene.folder / "whole")
    assert set(resuming.checkpoints_of(folder / "run")) == {*range(INTERVAL, STEPS + 1, INTERVAL)} - {*saves}


def assert_ends_or_continues(scene, folder, row):
    """With no byte left, not even for metrics.jsonl, the run may end with an error. It resumes when there is space."""
    with scene.launch(folder / "run", beside(folder, "notes-1"), ["step-7"]) as run:
        run.wait_for("step-7")
        fill(folder)
        run.go("step-7")
        code, output = run.end()
    assert code == 0 or "error: the disk is full" in output, output[-3000:]
    shutil.rmtree(folder / "filler")
    with scene.launch(folder / "run", beside(folder, "notes-2")) as again:
        again.succeed(row)
    assert_same(folder / "run", scene.folder / "whole")


NO_SPACE, NO_FILE = "[Errno 28] 0.6 MB are needed, and 0.1 MB are free", "[Errno 28] No space left on device"
DISKS = {  # a checkpoint is a folder and four files: 5 in all
    "no space for a checkpoint": (assert_continues, [{"bytes_left": 65536}] * 2, NO_SPACE),
    "files for 0, 2 of 5": (assert_continues, [{"files_left": n} for n in (0, 2)], NO_FILE),
    "files for 1, 4 of 5": (assert_continues, [{"files_left": n} for n in (1, 4)], NO_FILE),
    "not a byte": (assert_ends_or_continues,),
}


def full_disk(name, scene, table):
    """Run the case of one full disk."""
    folder = scene.new()
    folder.mkdir()
    if problem := runs.run(["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=400", "tmpfs", folder]).stderr:
        table.remark = f"A full disk: not tried, because no file system can be mounted here ({problem})."
        return
    try:
        with table.case(f"a full disk: {name}") as row:
            check, *how = DISKS[name]
            check(scene, folder, row, *how)
    finally:
        runs.succeed(["umount", "-l", folder])


WAITING = "waiting 60 s for it; once it has ended, this one goes on in the folder"


def two_runs(scene, how, row):
    """Start a second run in the folder of the first, which ends, is killed, or continues."""
    folder = scene.new()
    with scene.launch(folder / "run", folder / "notes-1", ["step-6"]) as first:
        first.wait_for("step-6")
        with scene.launch(folder / "run", folder / "notes-2") as second:
            if how == "lives":
                code, output = second.end()
                assert code != 0
                assert "is in use by process" in output, output[-3000:]
                first.go("step-6")
                first.succeed()
            else:
                printed = ""
                while WAITING not in printed:
                    line = second.process.stdout.readline()
                    assert line, "the second run ended without waiting"
                    printed += line
                if how == "ends":
                    first.go("step-6")
                    first.succeed()
                else:
                    runs.power_off(first.process)
                output = second.succeed(row)
                assert how != "ends" or "holds this run, finished" in output, output[-3000:]
    assert_same(folder / "run", scene.folder / "whole")


def campaign(folder, processes, files=None, strays=STRAYS, disks=DISKS, twice=("ends", "is killed", "lives")):
    """Run all cases, or only those of these damaged `files`, `strays`, `disks` and ends of the first of two runs."""
    scene, table = Scene(folder, processes), Table("disturbance")
    for name, damage in DAMAGES.items():
        for file in scene.files() if files is None else files:
            with table.case(f"newest checkpoint: {name}", file) as row:
                assert_skips_damaged(scene, damage, file, row)
    for name in strays:
        with table.case(f"beside the checkpoints: {name}") as row:
            assert_left_alone(scene, STRAYS[name], row)
    for name in disks:
        full_disk(name, scene, table)
    for how in twice:
        with table.case(f"two runs in a folder, the first {how}") as row:
            two_runs(scene, how, row)
    return table


if __name__ == "__main__":
    run_as_script(__doc__, campaign, processes=2)
