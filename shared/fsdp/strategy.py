"""How the processes of a run hold and save a model: whole (DDP), or in shards (FSDP2), with the rules of such a launch.

Which parts of a model are gathered together is decided here, and carried out by torch's `fully_shard`. Accelerate
decides by the modules that transformers declares indivisible. For most encoders these include the embeddings, and
Accelerate then fails on parameters that two of its parts share (tied weights, the decoder's bias).

Each process writes its own shard, by torch's distributed checkpoint, and any number of processes can read them. The
folders have the names and layout of Accelerate's, so Accelerate can read them.
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.checkpoints import folders
from shared.checkpoints.folders import ALGORITHM, new_digest
from shared.checkpoints.progress import Progress
from shared.checkpoints.resuming import NEW_RUN, read_state
from shared.checkpoints.saving import Saver
from shared.checkpoints.states import Tensors, Values, state_tensors
from shared.compat import of_accelerate_fsdp
from shared.config.options import Options, Rule
from shared.errors import UserError
from shared.models.trainable import called_layers
from shared.monitoring.hooks import Hook
from shared.optimization.optimizers import inner
from shared.plan.batches import Plan
from shared.processes import collectives, rules
from shared.processes.collectives import on_main_process, on_some
from shared.run.training_run import Ddp

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # folders of a checkpoint
WORKS = {  # the only value of a flag that works under FSDP
    "optim": "adamw",
    "gradient_compression": "none",  # FSDP sends gradients in float32
    "save_on_each_node": False,  # no machine has all shards
    "ema_decay": None,
    "torch_compile": False,  # not tested
}


def needs_ddp(config: Options) -> str | None:
    """The flag that does not work under FSDP, in words, or None."""
    for name, value in WORKS.items():
        if (found := getattr(config, name, value)) != value:
            return f"--{name} {found} does not work under FSDP: use --{name} {value}"
    return None


RULES = (
    Rule(
        lambda it: it.sharded and it.env.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() not in rules.FALSE,
        "fsdp_cpu_ram_efficient_loading is true, the default of Accelerate: only one process would load the weights, "
        "and none sends them to the others: set it to false",
    ),
    rules.one_of(("true", "false"), "FSDP_OFFLOAD_PARAMS"),  # with 1 Accelerate offloads, but without gloo for the host
    Rule(
        lambda it: it.sharded and it.on_cpu and not rules.is_true(it.env, rules.USE_CPU),
        "distributed_type FSDP needs a GPU, and there is none: use accelerate_configs/multi_cpu.yaml, or set "
        "ACCELERATE_USE_CPU=true in the environment to try FSDP out on a CPU",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and it.processes == 1,
        "distributed_type FSDP on a CPU with one process would shard nothing: start several processes, or use "
        "accelerate_configs/cpu.yaml",
    ),
    Rule(
        lambda it: it.sharded and it.precision == "fp16",
        "mixed_precision fp16 does not work under FSDP (its loss scaler fails with fused AdamW): use bf16",
    ),
    Rule(lambda it: it.sharded and needs_ddp(it.config), "{found}, or DDP (accelerate_configs/multi_gpu.yaml)"),
    Rule(
        lambda it: it.sharded and it.env.get("FSDP_VERSION", "1") != "2",
        "fsdp_version 1 is not supported: set fsdp_version: 2, as accelerate_configs/fsdp.yaml does",
    ),
)


class Sharding(Hook):
    """Shards the model of a run that was launched with FSDP. Others can resume from the checkpoints of such a run."""

    def opened(self, run: Any) -> None:
        """Choose how the processes hold the model, and which checkpoints they read."""
        if not rules.is_true(os.environ, rules.USE_FSDP):
            run.strategy.saver = SaverOfWhole
            return
        run.strategy = Fsdp()
        if run.accelerator.device.type == "cpu":
            of_accelerate_fsdp.use_fsdp_on_cpu(run.accelerator)


class SaverOfWhole(Saver):
    """Saves a model that is not sharded, and loads checkpoints of either kind.

    The frozen parameters of a pretrained model are left out; state.json has their digest.
    """

    def __init__(self, accelerator: Any, config: Options, plan: Plan) -> None:
        super().__init__(accelerator, config, plan)
        self.frozen = {} if getattr(config, "model_name_or_path", None) is None else frozen_parameters(self.model)
        self.left_out = self.frozen.keys()

    @cached_property
    def digest(self) -> dict[str, str] | None:
        """The digest of the frozen parameters, which some checkpoints hold: read it after one is loaded."""
        return digest_of_tensors(self.frozen.values()) if self.frozen else None

    def state(self, progress: Progress) -> dict[str, Any]:
        return super().state(progress) | {"frozen": self.digest}

    def load_tensors(self, checkpoint: Path) -> None:
        """Load the files of a checkpoint.

        Raises:
            UserError: the frozen parameters differ from those of the run that saved the checkpoint.
        """
        if is_sharded(checkpoint):  # has them, and no digest
            load_shard(checkpoint, self.model, self.optimizer)
        else:
            super().load_tensors(checkpoint)
        if read_state(checkpoint).get("frozen") not in (None, self.digest):
            raise UserError(
                f"{checkpoint} belongs to a run with other frozen weights: --model_name_or_path must name the model "
                "with which the run began, unchanged"
            )


def frozen_parameters(model: nn.Module) -> Tensors:
    """The parameters that are not trained, under all of their names."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def digest_of_tensors(tensors: Iterable[Tensor]) -> dict[str, str]:
    """A digest of shapes, dtypes and values, by its algorithm."""
    found = new_digest()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {ALGORITHM: found.hexdigest()}


class ShardedSaver(Saver):
    """Saves a sharded model: every process writes its part, also of frozen parameters, before `save` returns."""

    def __init__(self, accelerator: Any, config: Options, plan: Plan) -> None:
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
            save_shard(partial, self.model, self.optimizer)
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
            on_some(accelerator, main, lambda: folders.create(partial, sum(each.nbytes for each in tensors)), OSError)
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
        if not is_sharded(checkpoint):
            raise UserError(
                f"{checkpoint} was saved without FSDP and cannot be resumed with it: start without "
                f"accelerate_configs/fsdp.yaml, or {NEW_RUN}"
            )
        load_shard(checkpoint, self.model, self.optimizer)


class Fsdp(Ddp):
    """Each process has a shard of each parameter, of its gradient and of its optimizer state."""

    name = "FSDP2"
    saver = ShardedSaver
    equal_counts = True

    def place(self, accelerator: Any, model: nn.Module) -> None:
        """Shard the model, which also moves it to the device."""
        shard(accelerator, model)

    def wrap(self, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """As in DDP; the model is sharded already, and Accelerate only adds autocast."""
        collectives.wait_for_all(accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)

    def weights(self, accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
        """The gathered weights, with one tensor under all names of a tied parameter; FSDP gathers one for each name."""
        weights = super().weights(accelerator, model)
        parameters = dict(accelerator.unwrap_model(model).named_parameters(remove_duplicate=False))
        keys = {name: id(parameters.get(name, name)) for name in weights}
        whole = {keys[name]: tensor for name, tensor in weights.items()}
        return {name: whole[keys[name]] for name in weights}


def shard(accelerator: Any, model: nn.Module) -> None:
    """Shard a model's parameters over all processes, in place; call it on every process, before the optimizer is made.

    Each repeated layer is gathered when it computes and freed again, as `fsdp_reshard_after_forward` says. All other
    parameters (embeddings, heads, what several layers share) are gathered with the model itself, once per forward
    pass, and freed after its backward pass. A model without repeated layers is gathered as a whole.

    Weights and gradients travel in float32, and autocast computes in the precision of --mixed_precision: this is the
    arithmetic of DDP. Buffers are not sharded. Every process must have the same weights, since none are broadcast.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    collectives.wait_for_all(accelerator)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    settings = accelerator.state.fsdp_plugin  # what the launcher's `fsdp_config` asks for
    for each in model.parameters():  # FSDP2 refuses channels-last, and a convolution takes the format of its images
        each.data = each.data.contiguous()
    for layer in units(model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, offload_policy=settings.cpu_offload
        )
    fully_shard(model, mesh=mesh, offload_policy=settings.cpu_offload)


def units(model: nn.Module) -> list[nn.Module]:
    """The repeated layers that can be gathered alone: they have a forward pass, and parameters of their own only."""
    uses, layers = parameter_uses(model), called_layers(model)
    return [layer for layer in layers if (inside := parameter_uses(layer)) and inside.items() <= uses.items()]


def parameter_uses(module: nn.Module) -> Counter[int]:
    """Under how many names each parameter, by its id, occurs in a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint was saved from a sharded model."""
    return (path / MODEL).is_dir()


def save_shard(path: Path, model: nn.Module, optimizer: Any) -> None:
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


def load_shard(path: Path, model: nn.Module, optimizer: Any) -> None:
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
