"""Saving and loading. The state is copied to memory while the next step is computed, and a thread writes it."""

import json
import os
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from shared.checkpoints import folders
from shared.checkpoints.folders import Job
from shared.checkpoints.progress import Progress
from shared.checkpoints.resuming import NEW_RUN, problem_with, read_state
from shared.checkpoints.staging import Changed, Staging
from shared.checkpoints.states import (
    MODEL,
    OPTIMIZER,
    Tensors,
    Values,
    distinct,
    load_model,
    load_optimizer,
    modules_by_file,
    optimizer_state,
    state_tensors,
)
from shared.compat import of_accelerate
from shared.config import options
from shared.config.options import Options
from shared.disk import remedy
from shared.errors import UserError, about, complain, count_of, listed
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes.agreement import versions
from shared.processes.collectives import agree, gather, on_writers, writes
from shared.processes.signals import heard

ATTEMPTS, SECONDS_BETWEEN = 3, 5.0  # of the last save of a run, which nothing can make good
BETWEEN_ATTEMPTS = 60.0  # seconds, of a run that waits for its disk
NICENESS = 10  # of the thread that writes: it takes the time that training leaves


class Saver:
    """Saves and loads the model and optimizer that `accelerator` prepared; created and called on every process.

    `save` returns while parameters and optimizer states are still being copied to memory. The next optimizer step waits
    for this copy, and no other code may change them before (the method of CheckFreq: Mohan et al., FAST 2021). Then a
    thread writes them; at most one save is under way. One process of each machine that keeps checkpoints does this. A
    checkpoint is written before `save` returns if memory is short, or if the first save is after the last step of the
    plan. A save that fails prints a warning, the run continues, and the next save tries again. If that one fails as
    well, more than an interval of work could be lost: the run waits for its disk, or ends (--failed_saves). `finish`
    waits for the last save and requires it to succeed.

    Raises:
        UserError: a registered object is no module, or see `of_accelerate.prepared`.
    """

    left_out: Collection[str] = ()
    """The parameters of the model that a checkpoint may lack."""

    def __init__(self, accelerator: Any, config: Options, plan: Plan) -> None:
        self.accelerator, self.config, self.plan = accelerator, config, plan
        self.model, self.optimizer, self.others = of_accelerate.prepared(accelerator)
        if wrong := [type(each).__name__ for each in self.others if not isinstance(each, nn.Module)]:
            raise UserError(
                f"accelerator.register_for_checkpointing: a checkpoint cannot hold {listed(wrong)}: register "
                "modules of torch"
            )
        self.writes = self.takes_part = writes(accelerator, config)  # under FSDP, every process takes part
        self.versions = versions()
        self.in_background = True
        self.staging: Staging | None = None
        inner(self.optimizer).register_step_pre_hook(lambda *_: self._before_update())
        self._thread = ThreadPoolExecutor(1, "writer", initializer=lower_priority)
        self.writing: Future[None] | None = None  # under way
        self.job: Job | None = None  # of the last save
        self.problem: str | None = None  # of the last save
        self.committed = -1  # the newest step that this process has saved

    def is_due(self, progress: Progress) -> bool:
        """Whether to save now: by --checkpointing_steps, for a new best evaluation, or because the run stops early."""
        best = self.config.load_best_model_at_end and progress.best_step == progress.step
        if best or progress.out_of_patience(self.config.early_stopping_patience):
            return True
        every = self.config.checkpointing_steps
        return every != "no" and self.plan.due(None if every == "epoch" else int(every), progress.step - 1)

    def save(self, progress: Progress, monitored: dict[str, Any]) -> None:
        """Save the state after `progress.step` steps, with what the monitor keeps; call it on every process.

        Raises:
            UserError: this save and the one before failed, and --failed_saves is "end".
        """
        progress.monitor = monitored
        self.poll(wait=True)
        everybody = gather(self.accelerator, (self.committed if self.writes else None, self.problem))
        committed = [step for step, _ in everybody if step is not None]
        self.progress, self.step = progress, progress.step
        self.needed_from = min(committed) if self.config.save_on_each_node else None
        if self.takes_part:
            self._begin()
        if any(problem for _, problem in everybody):
            self._require_success()

    def _begin(self) -> None:
        """Begin to copy and write the state, or write it."""
        progress = self.progress
        tensors, values = self._state_of_objects()
        with about("a checkpoint cannot hold the state of an optimizer"):
            content = json.dumps(self.state(progress) | values, indent=1).encode()
        self.job = Job(
            folders.path_of(self.config.output_dir, progress.step),
            tensors,
            {"state.json": content},
            keep=self.config.save_total_limit,
            best=progress.best_step if self.config.load_best_model_at_end else None,
            needed_from=self.needed_from,
        )
        if self.staging and not self.staging.fits(tensors):
            self.close()
        if self.in_background and not self.staging and progress.step < self.plan.total_steps:
            try:
                self.staging = Staging(tensors)
            except MemoryError as error:
                self.in_background = False
                complain(f"checkpoints are written while the training waits: {error}")
        if self.staging:
            self.job.copied = self.staging.copy(tensors, self._lasting())
            self.job.tensors = self.staging.places
        self._write()

    def _require_success(self) -> None:
        """Wait until the save under way succeeds, because the one before failed; every process calls it."""
        self.poll(wait=True)
        if self.config.failed_saves == "end":
            agree(self.accelerator, self._error())
        # After a signal, `finish` tries again, and then ends the run.
        while any(gather(self.accelerator, self.problem)) and not any(gather(self.accelerator, heard.signal)):
            if self.problem and self.writes:
                complain("the run waits for that, and tries again each minute")
            wait_for_signal(BETWEEN_ATTEMPTS)
            self._repeat()

    def _error(self) -> UserError | None:
        """The problem of the last save as an error."""
        return UserError(f"{self.problem}, or set another --output_dir") if self.problem else None

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and try again if it failed. Call it on every process.

        Raises:
            UserError: on all processes, if one of them could not save it.
        """
        self.poll(wait=True)
        for _ in range(ATTEMPTS - 1):
            can_repeat = self.problem and (self.staging or self.progress.step == self.step)  # the state still exists
            if any(gather(self.accelerator, bool(can_repeat))):
                time.sleep(SECONDS_BETWEEN)
                self._repeat()
        self.close()
        agree(self.accelerator, self._error())
        if self.writes and self.job:  # now every machine has the last one
            folders.rotate(self.job.final, self.job.keep, self.job.best)

    def close(self) -> None:
        """Complete the save under way, and free its memory."""
        self.poll(wait=True)
        if self.staging:
            self.staging.close()
        self.staging = None

    def _repeat(self) -> None:
        """Save again where that failed: the state, or its copy if a step has changed it. Every process calls it."""
        if self.problem and self.progress.step == self.step:
            self._begin()
        elif self.problem and self.staging:
            self._write()
        self.poll(wait=True)

    def _lasting(self) -> set[int]:
        """The addresses of the tensors that only an optimizer step changes: parameters, and the optimizer's state."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {tensor.data_ptr() for tensor in (*parameters, *state_tensors(inner(self.optimizer)))}

    def _state_of_objects(self) -> tuple[dict[str, Tensors], Values]:
        """The tensors of the model, the optimizer and registered modules, by file and name, and their plain values."""
        scaler = self.accelerator.scaler
        values: Values = {"scaler": scaler.state_dict() if scaler is not None else None}
        states = {file: module.state_dict() for file, module in modules_by_file(self.model, self.others).items()}
        states[MODEL] = {name: tensor for name, tensor in states[MODEL].items() if name not in self.left_out}
        files = {file: distinct(state) for file, state in states.items()}
        files[OPTIMIZER], described = optimizer_state(self.model, self.optimizer)
        return files, values | {"optimizers": [described]}

    def _write(self) -> None:
        """Write the last job, in the background if its content is in memory."""
        assert self.job
        self.writing = self._thread.submit(folders.write_checkpoint, self.job)
        if not self.staging:
            self.poll(wait=True)

    def _before_update(self) -> None:
        """Wait until the tensors that the optimizer is about to change have been copied."""
        if self.job and self.job.copied:
            self.job.copied.exception()  # `poll` reads it as well

    def poll(self, wait: bool = False) -> None:
        """Read the outcome of the save under way, if it has ended, and print a warning if it has failed."""
        if self.writing and (wait or self.writing.done()):
            writing, self.writing = self.writing, None
            error = writing.exception()
            if isinstance(error, Changed):
                self.close()  # so that no other attempt writes this invalid copy
            if error and not isinstance(error, OSError | Changed):
                raise error
            self._record_outcome(error)

    def _record_outcome(self, error: BaseException | None) -> None:
        """Keep the outcome of a save, and print a warning about a failure."""
        assert self.job
        if not error:
            self.committed, self.problem = self.step, None
            return
        mend = f": {remedy(error)}" if isinstance(error, OSError) else ""
        self.problem = f"cannot save {self.job.final} ({error}){mend}"
        if self.writes:
            complain(f"warning: {self.problem}")

    def state(self, progress: Progress) -> dict[str, Any]:
        """The content of state.json."""
        return progress.state() | {
            "epoch": self.plan.epochs_completed(progress.step),
            "seed": self.config.seed,
            "config": options.plain(self.config),
            "world_size": self.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "versions": self.versions,
        }

    def load_tensors(self, checkpoint: Path) -> None:
        """Load each file of a checkpoint into the object that it was saved from."""
        for file, module in modules_by_file(self.model, self.others).items():
            load_model(module, checkpoint / file, self.left_out if module is self.model else ())
        load_optimizer(checkpoint, self.model, self.optimizer)

    def load(self, checkpoint: Path) -> None:
        """Load model, optimizer and scaler from a checkpoint; call it on every process.

        Raises:
            UserError: the model or the optimizer in the checkpoint has other shapes, or a file cannot be read.
        """
        try:
            self.load_tensors(checkpoint)
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(read_state(checkpoint)["scaler"])
        except torch.OutOfMemoryError:
            raise
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            raise UserError(
                f"{checkpoint} cannot be loaded into this model ({reason}): it was saved by other code or another "
                f"version of transformers, or a file can no longer be read; restore that, or {NEW_RUN}"
            ) from None

    def load_best(self, progress: Progress) -> None:
        """Load the best step's model, if the run exports that model and it is not the last step's.

        If its checkpoint is missing or damaged, print a warning and keep the last step's model. Also print a line if
        the run was stopped early.
        """
        accelerator, config, step = self.accelerator, self.config, progress.best_step
        if progress.out_of_patience(config.early_stopping_patience):
            accelerator.print(
                f"early stopping after step {progress.step}: {count_of(progress.evaluations_since_best, 'evaluation')} "
                f"without a better result than that of step {step}"
            )
        if not config.load_best_model_at_end or step is None or step == progress.step:
            return
        path = folders.path_of(config.output_dir, step)
        if not (problem := next(filter(None, on_writers(accelerator, config, lambda: problem_with(path))), None)):
            self.load(path)
            return
        accelerator.print(f"warning: {path}, with the best model, cannot be read ({problem}): model/ has the last one")
        progress.best_step, progress.best_results = progress.step, progress.results


def lower_priority() -> None:
    """Give the current thread a low priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def wait_for_signal(seconds: float) -> None:
    """Wait for some seconds, or until this process receives a signal."""
    end = time.monotonic() + seconds
    while not heard.signal and time.monotonic() < end:
        time.sleep(0.1)
