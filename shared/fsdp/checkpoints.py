"""Checkpoints of a model that is sharded over processes (FSDP2), by torch's distributed checkpoint.

Each process writes its own shard. The folders have the names and layout of Accelerate's, so Accelerate can read them.
Any number of processes can read them.
"""

import errno
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from shared.checkpoints import digests, folders
from shared.checkpoints.saving import Saver
from shared.checkpoints.states import Tensors, Values, state_tensors
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes.collectives import on_main_process, on_some


class ShardedSaver(Saver):
    """Saves a sharded model: every process writes its part before `save` returns.

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

    def _frozen(self) -> tuple[set[str], None]:
        """None: the shards of frozen parameters are written as well."""
        return set(), None

    def _state_of_objects(self) -> tuple[dict[str, Tensors], Values]:
        """None: torch's distributed checkpoint writes the tensors, and fp16, which has a scaler, is refused."""
        return {}, {"scaler": None}

    def _write(self) -> None:
        """Write the last job with all processes, commit it, and remove the old checkpoints."""
        assert self.job
        job, accelerator, problem = self.job, self.accelerator, None
        main = accelerator.is_main_process
        partial = on_main_process(accelerator, lambda: folders.partial_of(job.final))
        tensors = [tensor for model in self.models for tensor in model.state_dict().values()]
        tensors += [tensor for optimizer in self.optimizers for tensor in state_tensors(inner(optimizer))]

        def fill() -> dict[str, Any]:
            save(partial, self.models, self.optimizers)
            mine = [f"__{accelerator.process_index}_*"] + [".metadata"] * main  # the main process also writes the index
            files = [file for pattern in mine for file in partial.rglob(pattern)]
            lines = digests.lines_of({str(file.relative_to(partial)): file for file in files})
            if main:
                lines |= {name: digests.write_file(partial / name, [text]) for name, text in job.contents.items()}
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


def is_in(path: Path) -> bool:
    """Whether a checkpoint was saved from sharded models."""
    return (path / "pytorch_model_fsdp_0").is_dir()


def save(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    """Write and fsync this process's shard; call it on every process.

    Raises:
        OSError: on all processes, if one of them could not write.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    for name, state in _states(models, optimizers).items():
        try:
            checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(path / name))
        except CheckpointException as error:  # derived from BaseException
            rank, (cause, _) = next(iter(error.failures.items()))
            number, text = getattr(cause, "errno", None) or errno.EIO, getattr(cause, "strerror", None) or cause
            raise OSError(number, f"process {rank}: {text}") from None


def load(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    """Read this process's part, whatever the number of processes that wrote it; call it on every process.

    Models and optimizers that are not sharded are read as a whole.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    states = _states(models, optimizers)
    for name, state in states.items():
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path / name))
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        of_model, of_optimizer = states[f"pytorch_model_fsdp_{i}"]["model"], states[f"optimizer_{i}"]["optimizer"]
        set_state_dict(model, inner(optimizer), model_state_dict=of_model, optim_state_dict=of_optimizer)


def _states(models: list[nn.Module], optimizers: list[Any]) -> dict[str, dict[str, Any]]:
    """The state dicts by folder; their tensors are those of the models and optimizers."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states: dict[str, dict[str, Any]] = {}
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        of_model, of_optimizer = get_state_dict(model, inner(optimizer))
        states |= {f"pytorch_model_fsdp_{i}": {"model": of_model}, f"optimizer_{i}": {"optimizer": of_optimizer}}
    return states
