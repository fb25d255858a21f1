"""The NLP recipe, which pauses before some steps until a file tells it to continue.

In the environment, PAUSES=STEP,STEP... lists these steps, and PAUSE_FOLDER is the folder where the files go-STEP will
appear. Each start and each step adds a line to starts.jsonl there, which shows the tests how many processes trained.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from shared.plan.loading import Loader
from shared.processes import signals
from shared.run import command

root = Path(__file__).parent.parent.parent
folder, pauses = Path(os.environ["PAUSE_FOLDER"]), set(map(int, os.environ["PAUSES"].split(",")))
micro_batches = Loader.micro_batches


def note(**what):
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "world": os.environ["WORLD_SIZE"], **what}) + "\n")


def pause(loader, step):
    note(step=step)
    if step in pauses:
        while not (folder / f"go-{step}").exists() and not signals.heard.signal:
            time.sleep(0.05)
    return micro_batches(loader, step)


if __name__ == "__main__":
    note(started=True)
    Loader.micro_batches = pause
    spec = importlib.util.spec_from_file_location("nlp", root / "recipes/nlp.py")
    nlp = importlib.util.module_from_spec(spec)
    sys.modules["nlp"] = nlp
    spec.loader.exec_module(nlp)
    command.run(nlp.main, nlp.Config)
