"""Saving: the state is copied to memory while the next step is computed, and a thread writes the checkpoint."""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import torch

from shared.checkpoints import digests, folders, sharded
from shared.checkpoints.folders import Job, complain
from shared.checkpoints.progress import Progress
from shared.checkpoints.resuming import interval_ends, manifest_of, save_is_due
from shared.checkpoints.staging import Copy, Staging
from shared.checkpoints.states import Tensors, Values, digest_of, frozen_parameters, state_of
from shared.compat import of_accelerate
from shared.config import options
from shared.config.options import Options
from shared.disk import remedy
from shared.errors import UserError
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes.collectives import agree, gather, on_main_process, writes
from shared.processes.signals import heard

ATTEMPTS, SECONDS_BETWEEN = 3, 5.0  # of the last save of a run, which nothing can make good
MAY_WAIT = 10.0  # seconds that a run waits for the disk before it says so
BETWEEN_LINES = 60.0  # seconds between the attempts of a run that waits for its disk
NICENESS = 10  # of the thread that writes: it takes the time that training leaves
CHANGED = "code other than an optimizer step changed parameters while they were being copied"


class Saver:
    """Saves the model and optimizer that `accelerator` prepared; created and called on every process.

    `save` returns while parameters and optimizer states are still being copied to memory. The next optimizer step waits
    for this copy, and no other code may change them before (the method of CheckFreq: Mohan et al., FAST 2021). Then a
    thread writes them; at most one save is under way. One process of each machine that keeps checkpoints does this. A
    checkpoint is written before `save` returns if the model is sharded or memory is short. A save that fails prints a
    warning, the run continues, and the next save tries again. If that one fails as well, more than an interval of work
    could be lost: the run waits for its disk, or ends (--failed_saves). `finish` waits for the last save and requires
    it to succeed. Frozen parameters of a pretrained model are not written: a resumed run loads them from
    --model_name_or_path and compares their digest.
    """

    def __init__(self, accelerator: Any, config: Options, plan: Plan) -> None:
        # Schedulers and loaders are functions of the config and the step: Accelerate must not have prepared any.
        assert not of_accelerate.schedulers_and_loaders(accelerator)
        self.accelerator, self.config, self.plan = accelerator, config, plan
        self.models = of_accelerate.models(accelerator)
        self.optimizers = of_accelerate.optimizers(accelerator)
        self.others = of_accelerate.registered_objects(accelerator)
        self.sharded = any(map(sharded.is_sharded, self.models))
        assert not (self.sharded and self.others)
        if self.sharded and config.save_on_each_node:
            raise UserError(
                "--save_on_each_node: each process writes its shard of the model (FSDP), so one machine would not "
                "have all of them; leave the flag out, and name an --output_dir on a shared file system"
            )
        self.writes = writes(accelerator, config)
        if digests.ALGORITHM == "sha256":
            accelerator.print("checkpoints get SHA-256 digests, which are slow: pip install xxhash")
        self.settings = options.plain(config)
        self.frozen, self.frozen_digest = self._frozen()
        self.versions = {name: version(name) for name in ("torch", "accelerate", "transformers", "numpy")}
        self.in_background = not self.sharded
        self.staging: Staging | None = None
        self.copy: Copy | None = None  # under way
        for optimizer in self.optimizers:
            inner(optimizer).register_step_pre_hook(lambda *_: self._before_update())
        self._thread = ThreadPoolExecutor(1, "writer", initializer=lower_priority)
        self.writing: Future[None] | None = None  # under way
        self.job: Job | None = None  # of the last save
        self.problem: str | None = None  # of the last save
        self.remedy = ""  # of this problem
        self.committed = -1  # the newest step that this process has saved
        self.returned = 0.0  # when `save` last returned
        self.waited = 0.0  # seconds, for the disk

    def poll(self) -> None:
        """Advance the save under way without waiting for it, and print a warning if it has failed."""
        self._look()

    def is_due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due: by --checkpointing_steps, or for a new best evaluation."""
        return save_is_due(self.config, self.plan, progress)

    def save(self, progress: Progress, monitored: dict[str, Any]) -> None:
        """Save the state after `progress.step` steps, with what the monitor keeps; call it on every process."""
        progress.monitor = monitored
        due = time.perf_counter()
        self._look(wait=True)
        if self.job:
            self._warn_of_slow_disk(progress.step, due, time.perf_counter())
        everybody = gather(self.accelerator, (self.committed if self.writes else None, self.problem))
        committed = [step for step, _ in everybody if step is not None]
        self.progress, self.step = progress, progress.step
        if self.writes or self.sharded:
            self._begin(progress, min(committed) if self.config.save_on_each_node else None)
        if any(problem for _, problem in everybody):
            self._require_success()
        self.returned = time.perf_counter()

    def _begin(self, progress: Progress, needed_from: int | None) -> None:
        """Begin to copy and write the state, or write it."""
        tensors, values = self._state_of_objects()
        self.job = Job(
            folders.path_of(self.config.output_dir, progress.step),
            tensors,
            {"state.json": json.dumps(self._state(progress) | values, indent=1).encode()},
            keep=self.config.save_total_limit,
            best=progress.best_step if self.config.load_best_model_at_end else None,
            needed_from=needed_from,
        )
        if self.in_background and not (self.staging and self.staging.fits(tensors)):
            self._set_up(tensors)
        if self.staging:
            self.copy = self.staging.copy(tensors, self._lasting())
            self.job.tensors = self.staging.places
        else:
            self._write()

    def _set_up(self, tensors: dict[str, Tensors]) -> None:
        """Allocate memory for a state, or give up writing in the background."""
        self.close()
        try:
            self.staging = Staging(tensors)
        except MemoryError as error:
            self.in_background = False
            complain(f"checkpoints are written while the training waits: {error}")

    def _require_success(self) -> None:
        """Wait until the save under way succeeds, because the one before failed; every process calls it.

        Raises:
            UserError: it failed as well, and --failed_saves is "end".
        """
        self._look(wait=True)
        while any(problems := gather(self.accelerator, self.problem)):
            if self.config.failed_saves == "end":
                agree(self.accelerator, self._error())
            if any(gather(self.accelerator, heard.signal)):  # `finish` tries again, and then ends the run
                return
            if self.problem and self.writes:
                complain(f"{self.problem}: {self.remedy}; the run waits for that, and tries again each minute")
            wait_for_signal(BETWEEN_LINES)
            self._repeat(problems)

    def _error(self) -> UserError | None:
        """The problem of the last save as an error."""
        if not self.problem:
            return None
        return UserError(f"{self.problem}: {self.remedy}, or set another --output_dir")

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and try again if it failed. Call it on every process.

        Raises:
            UserError: on all processes, if one of them could not save it.
        """
        self._look(wait=True, last=True)
        for _ in range(ATTEMPTS - 1):
            problems = gather(self.accelerator, self.problem)
            if not any(problems) or not any(gather(self.accelerator, self._can_repeat())):
                break
            if self.problem and self.writes:
                complain(f"{self.problem}; trying again in {SECONDS_BETWEEN:g} s")
            time.sleep(SECONDS_BETWEEN)
            self._repeat(problems, last=True)
        problem = self._error()
        self.close()
        agree(self.accelerator, problem)
        if self.config.save_on_each_node and self.writes and self.job:  # now every machine has the last one
            folders.rotate(self.job.final, self.job.keep, self.job.best)

    def close(self) -> None:
        """Complete the save under way, and free its memory."""
        self._look(wait=True)
        if self.staging:
            self.staging.close()
        self.staging = None

    def _repeat(self, problems: list[str | None], last: bool = False) -> None:
        """Write the last checkpoint again where that failed; every process calls it, with the problems of all."""
        if self.sharded or (self.problem and self._can_repeat()):
            assert any(problems)
            assert self.job
            if not self.sharded and not self.staging:  # the state is as it was, or an invalid copy is replaced by it
                self.job.tensors, _ = self._state_of_objects()
            self._write()
        self._look(wait=True, last=last)

    def _warn_of_slow_disk(self, step: int, due: float, complete: float) -> None:
        """Say once that saves wait: that of `step` was due at time `due`, and the last one `complete` later.

        Only saves that --checkpointing_steps asks for count, because that flag is what the message proposes to change.
        """
        if (
            not self.writes
            or step == self.plan.total_steps
            or not all(interval_ends(self.config, self.plan, s) for s in (self.step, step))
        ):
            return
        before, self.waited = self.waited, self.waited + complete - due
        between, took = due - self.returned, complete - self.returned
        if before <= MAY_WAIT < self.waited:
            complain(
                f"warning: checkpoints are due faster than they are written: one every {between:.1f} s, and writing "
                f"takes {took:.1f} s. The training has waited {self.waited:.0f} s for that; --checkpointing_steps "
                f"{math.ceil(1.1 * (step - self.step) * took / between)} would not wait"
            )

    def _lasting(self) -> set[int]:
        """The addresses of the tensors that only an optimizer step changes."""
        return {tensor.data_ptr() for optimizer in self.optimizers for tensor in changed_by(inner(optimizer))}

    def _frozen(self) -> tuple[set[str], dict[str, str] | None]:
        """The names of the parameters that checkpoints leave out, and their digest, by its algorithm."""
        pretrained = getattr(self.config, "model_name_or_path", None) is not None  # a field of some recipes
        if self.sharded or not pretrained or len(self.models) != 1:
            return set(), None
        frozen = frozen_parameters(self.models[0])
        return {*frozen}, {digests.ALGORITHM: digest_of(frozen.values())} if frozen else None

    def _state_of_objects(self) -> tuple[dict[str, Tensors], Values]:
        """The tensors of the model, optimizers and registered objects, by file and name, and their plain values."""
        scaler = self.accelerator.scaler
        values: Values = {"scaler": scaler.state_dict() if scaler is not None else None}
        if self.sharded:  # torch.distributed.checkpoint writes them
            return {}, values
        tensors, more = state_of(self.models, self.optimizers, self.others, self.frozen)
        return tensors, values | more

    def _write(self) -> None:
        """Write the last job, in the background if its content is in memory."""
        assert self.job
        self.job.partial = folders.partial_of(self.job.final)
        if self.sharded:
            self._record_outcome(self._write_shards(self.job))
            return
        self.writing = self._thread.submit(folders.write, self.job)
        if not self.staging:
            self._look(wait=True)

    def _before_update(self) -> None:
        """Wait until the tensors that an optimizer is about to change have been copied."""
        if self.copy:
            self.copy.hold()
            self._hand_over()

    def _hand_over(self, wait: bool = False, last: bool = False) -> None:
        """Write the copy once it is complete."""
        if not self.copy or not (wait or self.copy.done()):
            return
        copy, self.copy = self.copy, None
        if copy.wait():
            self._write()
            return
        self.close()  # so that no other attempt writes this invalid copy
        self._record_outcome(RuntimeError(CHANGED), last)

    def _look(self, wait: bool = False, last: bool = False) -> None:
        """Read the outcome of the save under way, if it has ended."""
        self._hand_over(wait, last)
        if self.writing and (wait or self.writing.done()):
            writing, self.writing = self.writing, None
            error = writing.exception()
            if error and not isinstance(error, OSError):
                raise error
            self._record_outcome(error, last)

    def _record_outcome(self, error: BaseException | None, last: bool = False) -> None:
        """Keep the outcome of a save, and print a warning about a failure."""
        assert self.job
        if not error:
            self.committed, self.problem = self.step, None
            return
        why = folders.described(error, self.job) if isinstance(error, OSError) else str(error)
        self.problem, self.remedy = f"cannot save {self.job.final} ({why})", remedy(error)
        if self.writes and not last:
            complain(f"warning: {self.problem}; the next save tries again")

    def _write_shards(self, job: Job) -> OSError | None:
        """Write a checkpoint with all processes; return the first error of any of them, the same on all."""
        accelerator = self.accelerator
        job.partial = on_main_process(accelerator, lambda: job.partial)
        tensors = [tensor for model in self.models for tensor in model.state_dict().values()]
        tensors += [tensor for each in self.optimizers for tensor in state_tensors(inner(each))]
        job.more_bytes = sum(tensor.nbytes for tensor in tensors)

        def begin() -> None:
            if accelerator.is_main_process:
                folders.attempt(job.partial, lambda: None)
                folders.require_space(job.final.parent, job.bytes())

        def write() -> dict[str, Any]:
            sharded.save(job.partial, self.models, self.optimizers)
            if accelerator.is_main_process:
                for name, content in job.contents.items():
                    (job.partial / name).write_bytes(content)
            return manifest_of(job.partial, accelerator.process_index)

        def commit() -> None:
            if accelerator.is_main_process:
                lines = {name: line for part in parts for name, line in part.items()}
                folders.commit(job.partial, job.final, lines)
                folders.rotate(job.final, job.keep, job.best)

        problem, _ = self._together(begin)
        if not problem:
            problem, parts = self._together(write)
        if not problem:
            problem, _ = self._together(commit)
        if problem and accelerator.is_main_process:
            shutil.rmtree(job.partial, ignore_errors=True)
        return problem

    def _together(self, function: Callable[[], Any]) -> tuple[OSError | None, list[Any]]:
        """Call `function` on every process; return the first failure to write, or None, and the results of all."""
        result, problem = None, None
        try:
            result = function()
        except OSError as error:
            problem = error
        problems, results = zip(*gather(self.accelerator, (problem, result)), strict=True)
        return next(filter(None, problems), None), list(results)

    def _can_repeat(self) -> bool:
        """Whether the state of the last save still exists, in memory or as the current state."""
        return self.staging is not None or self.progress.step == self.step

    def _state(self, progress: Progress) -> dict[str, Any]:
        """The content of state.json."""
        return progress.state() | {
            "epoch": self.plan.epochs_completed(progress.step),
            "seed": self.config.seed,
            "config": self.settings,
            "world_size": self.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "versions": self.versions,
            "frozen": self.frozen_digest,
        }


def changed_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that a step of an optimizer changes: its parameters, and its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from state_tensors(optimizer)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def lower_priority() -> None:
    """Give the current thread a low priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def wait_for_signal(seconds: float) -> None:
    """Wait for some seconds, or until this process receives a signal."""
    end = time.monotonic() + seconds
    while not heard.signal and time.monotonic() < end:
        time.sleep(0.1)
