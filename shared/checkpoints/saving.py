"""Saving: the state is copied to memory while the next step is computed, and a second process writes the checkpoint."""

import io
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shared.checkpoints import digests, sharded, writer
from shared.checkpoints.buffers import Copy
from shared.checkpoints.layout import digest_of, distinct, flatten, frozen_parameters
from shared.checkpoints.progress import Progress
from shared.checkpoints.resuming import interval_ends, manifest_of, numbered, path_of, save_is_due
from shared.checkpoints.staging import Staging
from shared.checkpoints.writer import Job
from shared.compat import of_accelerate
from shared.config import options
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes.collectives import agree, gather, on_main_process
from shared.processes.writers import writes

ATTEMPTS, SECONDS_BETWEEN = 3, 5.0  # of the last save of a run, which nothing can make good
MAY_WAIT = 10.0  # seconds that a run waits for the disk before it says so
CANNOT_WRITE = (OSError, RuntimeError, SafetensorError)  # a full disk, as Python, torch and safetensors report it


class Saver:
    """Saves the model and optimizer that `accelerator` prepared; created and called on every process.

    `save` returns while parameters and optimizer states are still being copied to memory. The next optimizer step waits
    for this copy, and no other code may change them before (the method of CheckFreq: Mohan et al., FAST 2021). Then a
    second process writes them; at most one save is under way. Each process of a machine that writes has a share of the
    large files. A checkpoint is written before `save` returns if the model is sharded, memory is short, or the layout
    of the files is unknown. A save that fails prints a warning, the run continues, and the next save tries again.
    `finish` waits for the last save and requires it to succeed. Frozen parameters of a pretrained model are not
    written: a resumed run loads them from --model_name_or_path and compares their digest.
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
        self.staging = Staging(accelerator, config)
        self.copy: Copy | None = None  # under way
        for optimizer in self.optimizers:
            inner(optimizer).register_step_pre_hook(lambda *_: self._before_update())
        self.job: Job | None = None  # of the last save
        self.under_way = False
        self.problem: str | None = None  # of the last save
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
        models, archives = (self._models(), self._archives()) if self.in_background else ({}, {})
        ready = self.staging.is_ready(models | archives)
        mine = (random_states(self.accelerator), self.committed if self.writes else None, ready)
        everybody = gather(self.accelerator, mine)
        contents = {f"random_states_{rank}.pkl": of_rank for rank, (of_rank, *_) in enumerate(everybody)}
        if self.accelerator.scaler is not None:
            contents["scaler.pt"] = saved(self.accelerator.scaler.state_dict())
        contents["state.json"] = json.dumps(self._state(progress), indent=1).encode()
        self.job = Job(
            path_of(self.config.output_dir, progress.step),
            images={},
            contents=contents,
            keep=self.config.save_total_limit,
            best=progress.best_step if self.config.load_best_model_at_end else None,
        )
        if self.config.save_on_each_node:
            self.job.needed_from = min(step for _, step, _ in everybody if step is not None)
        self.progress, self.step = progress, progress.step
        if self.in_background:
            fit, connected = (all(each) for each in zip(*(each for *_, each in everybody), strict=True))
            if problem := self.staging.set_up(models, archives, fit, connected):
                self._give_up_background(problem)
            self.copy = self.staging.copy(self._lasting())
        self._write()
        self.returned = time.perf_counter()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and try again if it failed. Call it on every process.

        Raises:
            UserError: on all processes, if one of them could not save it.
        """
        self._look(wait=True, last=True)
        for _ in range(ATTEMPTS - 1):
            problems = gather(self.accelerator, self.problem and self._can_repeat() and self.problem)
            if not any(problems):
                break
            self._try_again(problems)
        problem = UserError(f"{self.problem}: free space, or set another --output_dir") if self.problem else None
        self.close()
        agree(self.accelerator, problem)
        if self.config.save_on_each_node and self.writes and self.job:  # now every machine has the last one
            writer.rotate(self.job.final, self.job.keep, self.job.best)

    def close(self) -> None:
        """Complete the save under way, end the writer, and free its memory."""
        self._hand_over(wait=True)
        self.staging.close()

    def _try_again(self, problems: list[str | None]) -> None:
        """Repeat the last save on the machines where it failed; every process calls it, with the problems of all."""
        if self.problem and self.writes:
            writer.complain(f"{self.problem}; trying again in {SECONDS_BETWEEN:g} s")
        time.sleep(SECONDS_BETWEEN)
        copied, connected = zip(
            *gather(self.accelerator, (self.staging.has_memory(), self.staging.has_writer())), strict=True
        )
        if not all(copied) or (not all(connected) and self.staging.connect()):
            self.staging.close()  # the leader alone writes the current state
        leader = next(iter(self.staging.partners), self.accelerator.process_index)
        if problems[leader] and self._can_repeat():
            self._write()
        self._look(wait=True, last=True)

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
            writer.complain(
                f"warning: checkpoints are due faster than they are written: one every {between:.1f} s, and writing "
                f"takes {took:.1f} s. The training has waited {self.waited:.0f} s for that; --checkpointing_steps "
                f"{math.ceil(1.1 * (step - self.step) * took / between)} would not wait"
            )

    def _give_up_background(self, why: str) -> None:
        """From now on, write checkpoints while the training waits; every process calls it."""
        self.staging.close()
        self.in_background = False
        if self.writes:
            writer.complain(f"checkpoints are written while the training waits: {why}")

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

    def _models(self) -> dict[str, Any]:
        """The states that safetensors writes, by file."""
        states = {numbered("model.safetensors", i): model.state_dict() for i, model in enumerate(self.models)}
        return {
            file: {name: tensor for name, tensor in state.items() if name not in self.frozen}
            for file, state in states.items()
        }

    def _archives(self) -> dict[str, Any]:
        """The states that torch.save writes, by file: optimizers, and objects registered for checkpointing."""
        optimizers = {numbered("optimizer.bin", i): inner(o).state_dict() for i, o in enumerate(self.optimizers)}
        return optimizers | {f"custom_checkpoint_{i}.pkl": other.state_dict() for i, other in enumerate(self.others)}

    def _write(self) -> None:
        """Write the last job, in the background if its content is in memory."""
        assert self.job
        self.job.partial = writer.partial_of(self.job.final)
        if self.sharded:
            self._record_outcome(self._write_shards(self.job))
        elif self.staging.buffers:
            assert self.staging.writer
            self.under_way = True
            if not self.copy:  # its content has been in memory since the last attempt
                self.staging.writer.start(self.job)
        elif self.writes:
            self._record_outcome(self._write_files(self.job))

    def _before_update(self) -> None:
        """Wait until the tensors that an optimizer is about to change have been copied."""
        if self.copy:
            self.copy.hold()
            self._hand_over()

    def _hand_over(self, wait: bool = False, last: bool = False) -> None:
        """Give the writer its job once the copy is complete."""
        if not self.copy or not (wait or self.copy.done()):
            return
        assert self.staging.writer
        assert self.job
        copy, self.copy = self.copy, None
        if copy.wait():
            self.staging.writer.start(self.job)
            return
        self.under_way = False
        self.close()  # so that no other attempt writes this invalid copy
        self._record_outcome("code other than an optimizer step changed parameters while they were being copied", last)

    def _look(self, wait: bool = False, last: bool = False) -> None:
        """Read the outcome of the save under way, if it has ended."""
        self._hand_over(wait, last)
        if self.under_way:
            assert self.staging.writer
            assert self.job
            if (problem := self.staging.writer.reply(wait)) is None:
                return
            self.under_way = False
            if self.staging.writer.process.poll() is not None:
                self.staging.writer = None
                if self.writes:
                    shutil.rmtree(self.job.partial, ignore_errors=True)
            self._record_outcome(problem, last)

    def _record_outcome(self, problem: str, last: bool = False) -> None:
        """Keep the outcome of a save, and print a warning about a failure."""
        assert self.job
        if not problem:
            self.committed, self.problem = self.step, None
            return
        if not (self.writes or self.sharded):  # the leader gets the problem, too
            return
        self.problem = f"cannot save {self.job.final} ({problem})"
        if self.writes and not last:
            writer.complain(f"warning: {self.problem}; the next save tries again")

    def _write_files(self, job: Job) -> str:
        """Write a checkpoint in this process, without a copy of the tensors; return the problem, or ""."""

        def fill() -> None:
            writer.require_space(job.final.parent, self._bytes(job))
            for file, model in self._models().items():
                tensors = {name: tensor.contiguous() for name, tensor in distinct(model).items()}
                save_file(tensors, job.partial / file, {"format": "pt"})
            for name, state in self._archives().items():
                torch.save(state, job.partial / name)
            for name, content in job.contents.items():
                (job.partial / name).write_bytes(content)
            writer.commit(job.partial, job.final, manifest_of(job.partial))

        try:
            writer.attempt(job.partial, fill)
        except CANNOT_WRITE as error:
            return f"{error}; {writer.space(job.final.parent, self._bytes(job))}"
        writer.rotate(job.final, job.keep, job.best, job.needed_from)
        return ""

    def _write_shards(self, job: Job) -> str:
        """Write a checkpoint with all processes; return the problem of any of them, or "", the same on all."""
        accelerator = self.accelerator
        job.partial = on_main_process(accelerator, lambda: job.partial)

        def begin() -> None:
            if accelerator.is_main_process:
                writer.attempt(job.partial, lambda: None)
                writer.require_space(job.final.parent, self._bytes(job))

        def write() -> dict[str, Any]:
            sharded.save(job.partial, self.models, self.optimizers)
            if accelerator.is_main_process:
                for name, content in job.contents.items():
                    (job.partial / name).write_bytes(content)
            return manifest_of(job.partial, accelerator.process_index)

        def commit() -> None:
            if accelerator.is_main_process:
                lines = {name: line for part in parts for name, line in part.items()}
                writer.commit(job.partial, job.final, lines)
                writer.rotate(job.final, job.keep, job.best)

        problem, _ = self._together(begin)
        if not problem:
            problem, parts = self._together(write)
        if not problem:
            problem, _ = self._together(commit)
        if problem and accelerator.is_main_process:
            shutil.rmtree(job.partial, ignore_errors=True)
            problem += f"; {writer.space(job.final.parent, self._bytes(job))}"
        return problem

    def _together(self, function: Callable[[], Any]) -> tuple[str, list[Any]]:
        """Call `function` on every process; return the first failure to write, or "", and the results of all."""
        result, problem = None, ""
        try:
            result = function()
        except CANNOT_WRITE as error:
            problem = str(error) or type(error).__name__
        problems, results = zip(*gather(self.accelerator, (problem, result)), strict=True)
        return next(filter(None, problems), ""), list(results)

    def _bytes(self, job: Job) -> int:
        """The size of a checkpoint on disk, except its smallest files."""
        states = [*self._models().values(), *self._archives().values()]
        return job.bytes() + sum(tensor.nbytes for state in states for tensor in flatten(state).tensors)

    def _can_repeat(self) -> bool:
        """Whether the state of the last save still exists, in memory or as the current state."""
        return self.staging.buffers is not None or self.progress.step == self.step

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
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def random_states(accelerator: Any) -> bytes:
    """This process's random_states file, in Accelerate's format for its load_state; this project does not read it."""
    states = {
        "step": accelerator.step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if accelerator.device.type == "cuda":
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return saved(states)


def saved(content: Any) -> bytes:
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
