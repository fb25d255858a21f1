"""Checkpoints of a model that is sharded over processes (FSDP2), by torch's distributed checkpoint.

Each process writes its own shard. The folders have the names and layout of Accelerate's, so Accelerate can read them.
Any number of processes can read them.
"""

import errno
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from shared.checkpoints import folders
from shared.checkpoints.resuming import NEW_RUN
from shared.checkpoints.saving import Saver
from shared.checkpoints.states import Tensors, Values, state_tensors
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes.collectives import on_main_process, on_some

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # folders


class ShardedSaver(Saver):
    """Saves a sharded model: every process writes its part, also of frozen parameters, before `save` returns.

    Raises:
        UserError: --save_on_each_node is given.
    """

    def __init__(self, accelerator: Any, config: Options, plan: Plan) -> None:
        if config.save_on_each_node:
            raise UserError(
                "--save_on_each_node: each process writes its shard of the model (FSDP), so one machine would not "
                "have all of them; leave the flag out, and name an --output_dir on a shared file system"
            )
        super().__init__(accelerator, config, plan)
        assert not self.others
        self.in_background, self.takes_part = False, True

    def _state_of_objects(self) -> tuple[dict[str, Tensors], Values]:
        """None: torch's distributed checkpoint writes the tensors, and fp16, which has a scaler, is refused."""
        return {}, {"scaler": None}

    def _write(self) -> None:
        """Write the last job with all processes, commit it, and remove the old checkpoints."""
        assert self.job
        job, accelerator, problem = self.job, self.accelerator, None
        main = accelerator.is_main_process
        partial = on_main_process(accelerator, lambda: folders.partial_of(job.final))
        tensors = [*self.model.state_dict().values(), *state_tensors(inner(self.optimizer))]

        def fill() -> dict[str, Any]:
            save(partial, self.model, self.optimizer)
            mine = [f"__{accelerator.process_index}_*"] + [".metadata"] * main  # the main process also writes the index
            files = [file for pattern in mine for file in partial.rglob(pattern)]
            lines = folders.lines_of({str(file.relative_to(partial)): file for file in files})
            if main:
                lines |= {name: folders.write_file(partial / name, [text]) for name, text in job.contents.items()}
            return lines

        def commit() -> None:
            folders.commit(partial, job.final, {name: line for part in lines for name, line in part.items()})
            folders.rotate(job.final, job.keep, job.best)

        try:
            on_some(accelerator, main, lambda: folders.begin(partial, sum(each.nbytes for each in tensors)), OSError)
            lines = on_some(accelerator, True, fill, OSError)
            on_some(accelerator, main, commit, OSError)
        except OSError as error:  # on every process
            problem = error
            if main:
                shutil.rmtree(partial, ignore_errors=True)
        self._record_outcome(problem)

    def load_tensors(self, checkpoint: Path) -> None:
        """Load this process's part of a sharded checkpoint.

        Raises:
            UserError: the checkpoint is not sharded.
        """
        if not is_in(checkpoint):
            raise UserError(
                f"{checkpoint} was saved without FSDP and cannot be resumed with it: start without "
                f"accelerate_configs/fsdp.yaml, or {NEW_RUN}"
            )
        load(checkpoint, self.model, self.optimizer)


def is_in(path: Path) -> bool:
    """Whether a checkpoint was saved from a sharded model."""
    return (path / MODEL).is_dir()


def save(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Write and fsync this process's shard; call it on every process.

    Raises:
        OSError: on all processes, if one of them could not write.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    for name, state in _states(model, optimizer).items():
        try:
            checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(path / name))
        except CheckpointException as error:  # derived from BaseException
            rank, (cause, _) = next(iter(error.failures.items()))
            number, text = getattr(cause, "errno", None) or errno.EIO, getattr(cause, "strerror", None) or cause
            raise OSError(number, f"process {rank}: {text}") from None


def load(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Read this process's part, whatever the number of processes that wrote it; call it on every process.

    A model and an optimizer that are not sharded are read as a whole.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    states = _states(model, optimizer)
    for name, state in states.items():
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path / name))
    of_model, of_optimizer = states[MODEL]["model"], states[OPTIMIZER]["optimizer"]
    set_state_dict(model, inner(optimizer), model_state_dict=of_model, optim_state_dict=of_optimizer)


def _states(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The state dicts by folder; their tensors are those of the model and the optimizer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, inner(optimizer))
    return {MODEL: {"model": of_model}, OPTIMIZER: {"optimizer": of_optimizer}}
