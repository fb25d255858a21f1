"""Code of all campaigns: a launch with watched processes, and the table of the results."""

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
PATIENCE = 600  # seconds that anything may take


def exported(output):
    """The weights a run ended with, as bytes."""
    return (output / "model/model.safetensors").read_bytes()


def last_step(output):
    """The last step that metrics.jsonl tells of, 0 before the first."""
    with contextlib.suppress(FileNotFoundError):
        if found := re.findall(r'"step": (\d+)', (output / "metrics.jsonl").read_text()):
            return int(found[-1])
    return 0


def wait_until(happened, process, seconds=PATIENCE):
    """Wait for something to happen in a run; False if the run has ended before."""
    deadline = time.monotonic() + seconds
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.001)
    return True


def flags_of(texts, bert):
    """The settings of the watched runs: a BERT with dropout, a record and a note of every step, a loader process."""
    return [
        *(*texts, *runs.TINY, "--model_name_or_path", bert, "--max_train_steps", STEPS, "--logging_steps", 1),
        *("--eval_steps", STEPS // 2, "--checkpointing_steps", INTERVAL, "--save_total_limit", "None"),
        *("--dataloader_num_workers", 1),
    ]


class Launch:
    """A launch of tests/campaigns/watched.py, started; `folder` is for its notes, `prefix` stands before the command.

    As a context it is ended with all it has started.
    """

    def __init__(self, processes, flags, output, folder, pauses=(), prefix=()):
        self.processes, self.output, self.folder, self.started = processes, output, folder, time.monotonic()
        self.before = last_step(output)
        folder.mkdir(parents=True)
        flags = [*flags, "--expect_processes", processes, "--output_dir", output]
        script = [runs.ROOT / "tests/campaigns/watched.py", *flags]
        self.process = runs.start(
            [*prefix, *(runs.torchrun(processes, *script) if processes > 1 else [sys.executable, *script])],
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            WATCH=str(folder),
            PAUSES=",".join(pauses),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        runs.end(self.process)

    def notes(self, kind):
        """What the processes have written down that has this key."""
        found = []
        for file in sorted(self.folder.glob("*.jsonl")):
            lines = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
            found += [note for note in map(json.loads, lines) if kind in note]
        return found

    def wait_for(self, point):
        """Wait until all processes wait at a point."""
        deadline = time.monotonic() + PATIENCE
        while sum(note["at"] == point for note in self.notes("at")) < self.processes:
            assert self.process.poll() is None, f"it ended before {point}: {self.end()[1][-3000:]}"
            assert time.monotonic() < deadline, f"not at {point} in {PATIENCE} s: {self.notes('at')}"
            time.sleep(0.02)

    def go(self, point):
        """Have the processes that wait at a point go on."""
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
        """Wait for the end of the launch; its exit code and what it said."""
        try:
            said = "".join(self.process.communicate(timeout=PATIENCE))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {PATIENCE} s; {len(self.notes('step'))} passes were made") from None
        return self.process.returncode, said

    def succeed(self, row=None):
        """Wait for the end of a launch that has to complete its run; what it said. `row`: as for `count`."""
        code, said = self.end()
        assert code == 0, said[-3000:]
        if row:
            self.count(row)
        return said

    def count(self, row):
        """Put into `row` what this launch has cost, which goes on where another one has ended."""
        if steps := self.notes("step"):
            row.repeated = max(row.repeated, self.before - min(note["step"] for note in steps) + 1)
            row.seconds = max(row.seconds, min(note["time"] for note in steps) - self.started)


def assert_same(output, whole):
    """A run ended with the weights of another, byte for byte, and with as many steps on record, of the same samples."""
    assert exported(output) == exported(whole), "other weights"
    ours, theirs = (runs.training_lines(folder) for folder in (output, whole))
    for key in ("step", "samples", "learning_rate", "grad_norm"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], f"another {key}"
    assert not (output / "PREEMPTED").exists()


@dataclass
class Row:
    """How a case has gone."""

    tried: int = 0
    survived: int = 0
    repeated: int = 0  # steps, at most
    seconds: float = 0.0  # from a start to its first step, at most


class Table:
    """The cases of a campaign, and what came of them."""

    def __init__(self, heading):
        self.heading, self.rows, self.failures, self.remark = heading, {}, [], ""

    @contextlib.contextmanager
    def case(self, name, detail=""):
        """Try something once: it has survived unless an assertion fails, which is said and ends nothing else."""
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


def run_as_script(doc, campaign, **numbers):
    """Run a campaign with its numbers from the command line, print its table; exit code 1 if anything has failed."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory() as folder:
        table = campaign(Path(folder), **vars(parser.parse_args()))
    print(table)
    sys.exit(bool(table.failures))
