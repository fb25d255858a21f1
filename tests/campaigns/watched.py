"""A text recipe, which logs what it does and waits at some points until a file tells it to continue.

RECIPE in the environment names it. WATCH is a folder. Each process adds lines of JSON to its own file there: the rows
that enter the model in each step, the points where it waits, and its exit code. PAUSES names these points, separated by
commas. At each of them the process waits for the file go-POINT. The points are

    data           the training data are about to be read
    first pass     the discarded pass before the first step is about to begin
    step-N         the gradients of step N are computed, the weights are not yet updated, and no save is under way
    save-N         the checkpoint of step N is about to be written; the thread that writes it waits meanwhile
    evaluation-N   the evaluation after step N is about to read its first batch
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import call_recipe
import runs
import torch

from shared.checkpoints.saving import Saver
from shared.metrics.task_metrics import TaskMetrics
from shared.plan.loading import Loader
from shared.report import page
from shared.run import command, training_run

FOLDER, PAUSES = Path(os.environ["WATCH"]), os.environ.get("PAUSES", "").split(",")
RANK, PROCESS = int(os.environ.get("RANK", 0)), os.getpid()
step_under_way = 0  # counted from 1; 0 before the first
savers = []


def note(**what):
    with (FOLDER / f"rank-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": RANK, "time": time.monotonic(), **what}) + "\n")


def pause(point):
    if point in PAUSES:
        for saver in savers if point.startswith("step-") else ():
            saver.poll(wait=True)
        note(at=point)
        while not (FOLDER / f"go-{point}").exists():
            time.sleep(0.005)


def before(point, function):
    """`function`, changed so that the process first waits at the point."""

    def wait_and_call(*arguments):
        pause(point())
        return function(*arguments)

    return wait_and_call


def counted(loader, step, micro_batches=Loader.micro_batches):
    """The micro-batches of a step, whose number is kept in `step_under_way`."""
    global step_under_way  # noqa: PLW0603
    step_under_way = step + 1
    return micro_batches(loader, step)


def watched(build_model):
    """A recipe's `build_model`, whose model notes the rows that enter it.

    Passes without a graph are left out: embeddings.py computes the embeddings of a step first.
    """

    def build(*arguments):
        model = build_model(*arguments)

        def write(model, _, batch):
            if model.training and step_under_way and torch.is_grad_enabled():
                note(step=step_under_way, rows=call_recipe.rows_of(batch))

        model.register_forward_pre_hook(write, with_kwargs=True)
        return model

    return build


def paused_save(saver, *state, save=Saver.save):
    """Save a checkpoint; at a pause, all processes wait before it is written. `pause` uses the saver at a step."""
    savers[:] = [saver]
    may_write, point = threading.Event(), f"save-{step_under_way}"
    if point in PAUSES:
        saver._thread.submit(may_write.wait)
    save(saver, *state)
    pause(point)
    may_write.set()


def noted_exit(code, exit=os._exit):
    """End this process and note its exit code; forked processes end without a note."""
    if os.getpid() == PROCESS:
        note(exit=code)
    exit(code)


if __name__ == "__main__":
    page.draw_curves = lambda *_: None  # curves and metrics would take longer than the run
    TaskMetrics.compute = lambda metrics, *_: dict.fromkeys(metrics.names, 0.0)
    recipe = runs.load_recipe(os.environ["RECIPE"])
    recipe.load_data = before(lambda: "data", recipe.load_data)
    recipe.build_model = watched(recipe.build_model)
    training_run.run_warm_up_pass = before(lambda: "first pass", training_run.run_warm_up_pass)
    recipe.gradients.clip = before(lambda: f"step-{step_under_way}", recipe.gradients.clip)
    recipe.feed = before(lambda: f"evaluation-{step_under_way}", recipe.feed)
    Loader.micro_batches, os._exit, Saver.save = counted, noted_exit, paused_save
    command.run(recipe.main, recipe.Config)
    note(exit=0)
