"""What the tests of clusters share: programs from apt, and runs of paused_recipe.py to wait for."""

import json
import os
import shutil
import subprocess
import time

import pytest
import runs

RECIPE = "tests/clusters/paused_recipe.py"
STEPS, PAUSE = 16, 8
FLAGS = [*runs.TINY, "--max_train_steps", STEPS, "--eval_steps", STEPS, "--checkpointing_steps", "no"]


def require(program, packages):
    """Skip the test without root, or without a program that apt does not install."""
    if not shutil.which(program):
        subprocess.run(f"apt-get update -qq && apt-get install -qq -y {packages}", shell=True, check=False)
    if not shutil.which(program) or os.getuid() != 0:
        pytest.skip(f"needs root and {packages}")


def environment(folder, *pauses, threads=1):
    """The environment of a run on a simulated machine, which pauses before some steps and has its notes in `folder`."""
    found = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    found |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # there is no name server in a namespace
    return found | {"PAUSE_FOLDER": str(folder), "PAUSES": ",".join(map(str, pauses))}


def notes(folder):
    file = folder / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def paused(folder, processes=2):
    """Whether all processes have reached the pause."""
    return sum(note.get("step") == PAUSE for note in notes(folder)) == processes


def wait_for(what, *logs, alive=lambda: True, seconds=300):
    """Wait until `what()` is true; return its value. The logs are printed if it takes too long or the run ends."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-5000:] for log in logs if log.exists())
        assert alive(), "\n".join(log.read_text()[-5000:] for log in logs if log.exists())
        time.sleep(0.1)
    return value
