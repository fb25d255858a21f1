"""Starting and ending a run: the Accelerator, its guards, errors that every process ends with, dropout seeds.

A launch that would silently train something else than was asked for does not start. Only local rank 0 of a machine
speaks; the others wait for it, because torchrun kills the rest a tenth of a second after the first process has ended.
"""

import ctypes
import functools
import os
import warnings
from typing import Any, TypeVar

import torch

from shared.compat import of_accelerate
from shared.config import options
from shared.errors import UserError
from shared.launch import agreement, environment, rendezvous
from shared.processes import exit_reasons, patience
from shared.processes.accelerate_state import new_accelerator
from shared.processes.patience import PROCESS_GROUP_TIMEOUT

TASKS_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
Config = TypeVar("Config", bound=options.Options)


def start(config: options.Options) -> Any:
    """The Accelerator of a run, after every guard has passed.

    Raises:
        UserError: names the setting that would have made another run of this, and the fix.
    """
    options.check(config)  # which a config of a notebook has not passed
    if not config.output_dir:
        raise UserError("--output_dir '' would be the working folder: name a folder for the run")
    if torch.distributed.is_initialized() and "RANK" not in os.environ:  # by debug_launcher, which says no more
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    told_to = told_to_use_cpu()
    on_cpu = told_to or not torch.accelerator.is_available()
    check_environment(config, on_cpu)
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    from shared.launch.gradient_compression import DDPSettings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, it warns at every fork of a loader worker
    if on_cpu:
        torch.set_num_threads(threads_per_process())
        keep_freed_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    else:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    # Accelerate can only say broadcast_buffers by that old name, about which torch warns.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    device = "cpu" if on_cpu else "gpu"
    method = agreement.init_method(config, device)
    has_met = torch.distributed.is_initialized()
    make = functools.partial(
        Accelerator,
        cpu=on_cpu,  # without it two processes on a machine without a GPU each believe they are alone
        mixed_precision=None if config.mixed_precision == "launcher" else config.mixed_precision,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PROCESS_GROUP_TIMEOUT, init_method=method)],
    )
    accelerator = new_accelerator(make)
    if has_met:
        agreement.compare(*rendezvous.place_met(), config, device, patience.SILENT)
    if on_cpu and uses_fsdp():
        of_accelerate.use_fsdp_on_cpu(accelerator)
    of_accelerate.set_ddp_handler(accelerator, DDPSettings(config.gradient_compression))
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:
        raise UserError(
            f"WORLD_SIZE says {launched} processes, Accelerate says {accelerator.num_processes}: each would train "
            "alone; start with `accelerate launch --config_file accelerate_configs/…` or torchrun"
        )
    if config.expect_processes not in (None, accelerator.num_processes):
        raise UserError(
            f"--expect_processes {config.expect_processes}, but {accelerator.num_processes} started: some launchers "
            "start one process without saying so; use accelerate_configs/multi_cpu.yaml or torchrun --nproc-per-node"
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UserError(
            f"distributed_type {accelerator.distributed_type.value} is not supported: the loop's loss normalizer and "
            "checkpoints are made for DDP and FSDP2; use accelerate_configs/multi_gpu.yaml or fsdp.yaml"
        )
    return accelerator


def told_to_use_cpu() -> bool:
    """use_cpu in the launcher's YAML, or a debug_launcher, which says yes."""
    return environment.says_yes(os.environ, "ACCELERATE_USE_CPU")


def uses_fsdp() -> bool:
    """`distributed_type: FSDP` in the launcher's YAML."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_environment(config: options.Options, on_cpu: bool) -> None:
    """What the launcher asks for against what this machine can do.

    Raises:
        UserError: names the setting and the fix.
    """
    env = os.environ
    environment.check(env)
    unread = env.get("MIXED_PRECISION", "no") if "NPROC" in env and "ACCELERATE_MIXED_PRECISION" not in env else "no"
    if unread != "no" and config.mixed_precision == "launcher":
        raise UserError(
            f"mixed_precision {unread} of notebook_launcher never reaches Accelerate: give the recipe's "
            f'Config(mixed_precision="{unread}") instead'
        )
    started = next((name for name in TASKS_STARTED if int(env.get(name, 1)) > 1), None)
    if started and "WORLD_SIZE" not in env:
        raise UserError(
            f"{started} is {env[started]}, as mpirun and srun set it, but nothing tells these processes of each other: "
            "have it start one process per machine, and that one `torchrun` or `accelerate launch`"
        )
    if int(env.get("WORLD_SIZE", 1)) > 1 and (
        missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    ):
        raise UserError(
            f"WORLD_SIZE is {env['WORLD_SIZE']} without {', '.join(missing)}: the processes would not find each other; "
            "set these too, or let torchrun or accelerate launch do it"
        )
    precision = (
        env.get("ACCELERATE_MIXED_PRECISION", "no") if config.mixed_precision == "launcher" else config.mixed_precision
    )
    if precision == "fp16" and on_cpu:
        raise UserError(
            "mixed_precision fp16 needs a GPU (on a CPU Accelerate would silently train in full precision): use "
            "--mixed_precision no, or bf16"
        )
    sharded = uses_fsdp()
    if config.auto_micro_batch and (on_cpu or sharded):
        reason = (
            "the memory of a CPU is no hard limit" if on_cpu else "under FSDP a trial on one process blocks the others"
        )
        raise UserError(f"--auto_micro_batch needs GPUs and DDP ({reason}): give the budget yourself")
    if config.auto_micro_batch and getattr(config, "sync_batchnorm", False):
        raise UserError(
            "--auto_micro_batch does not work with --sync_batchnorm, under which a trial on one process blocks the "
            "others: leave one of them out"
        )
    if precision == "fp8":
        raise UserError("mixed_precision fp8 is not supported: use --mixed_precision bf16")
    if sharded:
        if on_cpu and not told_to_use_cpu():
            raise UserError(
                "distributed_type FSDP needs a GPU, and there is none: use accelerate_configs/multi_cpu.yaml, or set "
                "ACCELERATE_USE_CPU=true in the environment to try FSDP out on a CPU"
            )
        if on_cpu and int(env.get("WORLD_SIZE", 1)) == 1:
            raise UserError(
                "distributed_type FSDP on a CPU with one process would shard nothing: start several processes, or use "
                "accelerate_configs/cpu.yaml"
            )
        if precision == "fp16":
            raise UserError(
                "mixed_precision fp16 does not work under FSDP (its loss scaler and fused AdamW do not fit): use bf16"
            )
        if config.optim != "adamw":
            raise UserError(
                f"--optim {config.optim} does not work under FSDP, whose shards only AdamW is made for here: use "
                "--optim adamw, or DDP"
            )
        if config.gradient_compression != "none":
            raise UserError(
                f"--gradient_compression {config.gradient_compression} has no effect under FSDP, which sends "
                "gradients in float32: leave it out, or use DDP"
            )
        if env.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "fsdp_version 1 is not supported: set fsdp_version: 2, as accelerate_configs/fsdp.yaml does"
            )
    # Each process looks at their number: one that passed would wait in its first collective call for those that ended.
    processes = int(env.get("LOCAL_WORLD_SIZE", exit_reasons.local_rank() + 1))
    if not on_cpu and processes > torch.accelerator.device_count():
        raise UserError(
            f"{processes} processes on a machine with "
            f"{torch.accelerator.device_count()} GPU(s): lower --num_processes (--nproc-per-node) to the number of GPUs"
        )


def threads_per_process() -> int:
    """Threads of torch on a CPU: OMP_NUM_THREADS if the user set it, else the cores of the machine shared out.

    torchrun and accelerate set OMP_NUM_THREADS to 1 for everybody; that is their default and nobody's choice.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further ones are for nested teams
    given = int(first) if first.isdecimal() else 0  # what is no number, OpenMP passes over as well
    launcher = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if given and not (given == 1 and launcher):
        return given
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next step instead of handing it back to the kernel.

    By default it returns every large block when it is freed, and each step faults its activations in again, page by
    page: 40,000 page faults and 3-4 % of the time of a step of a 4-layer x 256 encoder. What torch allocates is put
    into pages of 2 MiB, which saves another 3 %: where the kernel has them on request, nobody asks by default.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it allocates the first tensor
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc; a preloaded allocator has rules of its own
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
