"""Code that all campaigns use: launches with watched processes, and the table of the results."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import runs

STEPS, INTERVAL = 24, 4  # of the watched runs, and steps between their checkpoints
PATIENCE = 600  # seconds to wait for anything


def last_step(output):
    """The last step in metrics.jsonl, 0 before the first."""
    with contextlib.suppress(FileNotFoundError):
        if found := re.findall(r'"step": (\d+)', (output / "metrics.jsonl").read_text()):
            return int(found[-1])
    return 0


def wait_until(happened, process, seconds=PATIENCE):
    """Wait until `happened()` is true; return False if the run ends first."""
    deadline = time.monotonic() + seconds
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"the event did not happen in {seconds} s"
        time.sleep(0.001)
    return True


def flags_of(data, bert):
    """The settings of the watched runs: a BERT with dropout, every step logged, a loader process."""
    return [
        *(*data, *runs.TINY, "--model_name_or_path", bert, "--max_train_steps", STEPS, "--logging_steps", 1),
        *("--eval_steps", STEPS // 2, "--checkpointing_steps", INTERVAL, "--save_total_limit", "None"),
        *("--dataloader_num_workers", 1),
    ]


class Launch:
    """A running launch of a recipe by tests/campaigns/watched.py.

    `folder` gets its notes; `prefix` stands before the command.
    At the end of its context, all processes that it has started are killed.
    """

    def __init__(self, processes, flags, output, folder, pauses=(), prefix=(), recipe="nlp"):
        self.processes, self.output, self.folder, self.started = processes, output, folder, time.monotonic()
        self.before = last_step(output)
        folder.mkdir(parents=True)
        flags = [*flags, "--expect_processes", processes, "--output_dir", output]
        script = [runs.ROOT / "tests/campaigns/watched.py", *flags]
        self.process = runs.start(
            [*prefix, *(runs.torchrun(processes, *script) if processes > 1 else [sys.executable, *script])],
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            RECIPE=recipe,
            WATCH=str(folder),
            PAUSES=",".join(pauses),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        runs.end(self.process)

    def notes(self, kind):
        """The notes of all processes that have this key."""
        found = []
        for file in sorted(self.folder.glob("*.jsonl")):
            lines = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
            found += [note for note in map(json.loads, lines) if kind in note]
        return found

    def wait_for(self, point):
        """Wait until all processes have reached a point of `pauses`."""
        deadline = time.monotonic() + PATIENCE
        while sum(note["at"] == point for note in self.notes("at")) < self.processes:
            assert self.process.poll() is None, f"the launch ended before {point}: {self.end()[1][-3000:]}"
            assert time.monotonic() < deadline, f"not at {point} in {PATIENCE} s: {self.notes('at')}"
            time.sleep(0.02)

    def go(self, point):
        """Let the processes that wait at a point continue."""
        (self.folder / f"go-{point}").touch()

    def trainers(self):
        """The training processes, by rank."""
        found = [child for child in psutil.Process(self.process.pid).children() if "RANK" in child.environ()]
        return sorted(found, key=lambda child: int(child.environ()["RANK"]))

    def tree(self):
        """Every process of the launch."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def end(self):
        """Wait for the end of the launch; return its exit code and output."""
        try:
            printed = "".join(self.process.communicate(timeout=PATIENCE))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {PATIENCE} s, after {len(self.notes('step'))} passes") from None
        return self.process.returncode, printed

    def succeed(self, row=None):
        """Wait for the end of a launch that must complete its run; return its output. `row`: as for `count`."""
        code, printed = self.end()
        assert code == 0, printed[-3000:]
        if row:
            self.count(row)
        return printed

    def count(self, row):
        """Add the cost of this launch, which resumes an earlier one, to `row`: repeated steps and seconds."""
        if steps := self.notes("step"):
            row.repeated = max(row.repeated, self.before - min(note["step"] for note in steps) + 1)
            row.seconds = max(row.seconds, min(note["time"] for note in steps) - self.started)


def assert_same(output, whole):
    """Assert that two runs have the same weights, byte for byte, and the same steps and samples in metrics.jsonl."""
    assert runs.exported(output) == runs.exported(whole), "the weights differ"
    ours, theirs = (runs.training_lines(folder) for folder in (output, whole))
    for key in ("step", "samples", "learning_rate", "grad_norm"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], f"{key} differs"
    assert not (output / "PREEMPTED").exists()


@dataclass
class Row:
    """The results of one case."""

    tried: int = 0
    survived: int = 0
    repeated: int = 0  # most steps that one launch repeated
    seconds: float = 0.0  # longest time from a start to its first step


class Table:
    """The cases of a campaign and their results."""

    def __init__(self, heading):
        self.heading, self.rows, self.failures, self.remark = heading, {}, [], ""

    @contextlib.contextmanager
    def case(self, name, detail=""):
        """Try a case once. A failed assertion is printed and recorded, and the campaign continues."""
        row = self.rows.setdefault(name, Row())
        row.tried += 1
        print(f"{time.strftime('%H:%M:%S')} {name} {detail}", file=sys.stderr, flush=True)
        try:
            yield row
            row.survived += 1
        except AssertionError as error:
            self.failures.append(f"{name} {detail}: {error}")
            print(f"FAILED: {self.failures[-1]}", file=sys.stderr, flush=True)

    def __str__(self):
        lines = [f"| {self.heading} | tried | survived | worst steps repeated | worst recovery, s |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for name, row in self.rows.items():
            seconds = f"{row.seconds:.1f}" if row.seconds else ""
            lines.append(f"| {name} | {row.tried} | {row.survived} | {row.repeated} | {seconds} |")
        return "\n".join([*lines, *(["", self.remark] if self.remark else [])])


def run_as_script(doc, campaign, **settings):
    """Run a campaign with settings from the command line, print its table; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in settings.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    with tempfile.TemporaryDirectory() as folder:
        table = campaign(Path(folder), **vars(parser.parse_args()))
    print(table)
    sys.exit(bool(table.failures))
