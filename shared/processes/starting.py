"""Start a run: check the launch and make the Accelerator.

A launch that would silently train something else than its settings say is refused.
"""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from shared.compat import of_accelerate, of_torch
from shared.config import options
from shared.errors import UserError
from shared.processes import agreement, ending, folder_lock, rules
from shared.processes.collectives import PROCESS_GROUP_TIMEOUT


def set_backends(deterministic: bool) -> None:
    """Set how torch computes on a GPU; with --deterministic, only by deterministic kernels and products without TF32.

    An earlier run of this process may have set something else. cuDNN's attention is off, because it plans anew for each
    shape, and some of its versions give NaN gradients with a mask (pytorch#196678).
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32 = not deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.enable_cudnn_sdp(False)


WITHOUT_GPU = ("No CUDA GPUs are available", "Found no NVIDIA driver", "you might not have a CUDA gpu")


def start(config: options.Options, timeout: timedelta = PROCESS_GROUP_TIMEOUT) -> Any:
    """Check the settings and the launch, and return the Accelerator of the run.

    The processes have `timeout` to connect, and for each collective call.

    Raises:
        UserError: a setting is wrong, is not supported, or would be ignored; names the setting and the fix. Or this
            process was forked from one that had started a run.
    """
    if _pids_with_runs - {os.getpid()}:
        raise UserError(
            "notebook_launcher must come first: this notebook has started a run in its own process, and processes "
            "forked from it cannot use CUDA and may hang; restart the kernel and launch first"
        )
    options.check(config)  # a config made in a notebook has not been checked
    if not config.output_dir:
        raise UserError("--output_dir '' would be the working directory: name a folder for the run")
    if torch.distributed.is_initialized() and "RANK" not in os.environ:  # started by debug_launcher, which sets no rank
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    on_cpu = rules.is_true(os.environ, rules.USE_CPU) or not has_accelerator()
    rules.refuse(launch := rules.Launch(config, os.environ, on_cpu))
    share_gpu = not on_cpu and launch.processes_here > torch.accelerator.device_count()  # allowed for tests only
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedDataParallelKwargs

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, tokenizers warn at each fork of a loader worker
    if on_cpu:
        torch.set_num_threads(threads_per_process())
        keep_freed_memory()
    set_backends(config.deterministic)
    # Accelerate passes broadcast_buffers by its old name, which torch warns about.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    if share_gpu:
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # or DDP gets LOCAL_RANK as the index of its GPU
    device = "cpu" if on_cpu else "gpu"
    method = agreement.init_method(config, device)
    has_group = torch.distributed.is_initialized()
    reset()
    _pids_with_runs.add(os.getpid())
    accelerator = Accelerator(
        cpu=on_cpu,  # without it, each process on a machine without a GPU would train alone
        mixed_precision=None if config.mixed_precision == "launcher" else config.mixed_precision,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="gloo" if share_gpu else "nccl", timeout=timeout, init_method=method),
            # Buffers are not broadcast: that would overwrite batch-norm statistics averaged over processes.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
        ],
    )
    if has_group:
        agreement.compare_processes(of_torch.default_store(), config, device, timeout.total_seconds())
    if accelerator.num_processes != launch.processes:
        raise UserError(
            f"WORLD_SIZE is {launch.processes}, but Accelerate has {accelerator.num_processes} process(es): each would "
            "train alone; start with `accelerate launch --config_file accelerate_configs/…` or torchrun"
        )
    return accelerator


def has_accelerator() -> bool:
    """Whether torch can use an accelerator.

    Raises:
        UserError: there is an NVIDIA GPU that torch cannot use, because of its driver for example; without this error
            the run would silently train on the CPU.
    """
    warnings.filterwarnings("ignore", message="CUDA initialization")  # the error below has the same text
    if torch.accelerator.is_available():
        return True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if torch.version.cuda and not hidden:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            if not any(words in reason for words in WITHOUT_GPU):
                raise UserError(
                    f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use this machine's GPU "
                    f"({reason}): install a driver that fits this torch, or a torch that fits the driver; to train on "
                    "the CPU set ACCELERATE_USE_CPU=true"
                ) from None
    return False


def threads_per_process() -> int:
    """The number of CPU threads for torch: OMP_NUM_THREADS if the user set it, else an equal share of the cores.

    torchrun and accelerate set OMP_NUM_THREADS to 1 by default, so under a launcher 1 is not a choice of the user.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    given = int(first) if first.isdecimal() else 0  # OpenMP ignores other values, too
    launcher = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if given and not (given == 1 and launcher):
        return given
    return max(1, len(os.sched_getaffinity(0)) // ending.local_processes())


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for the next step, and make torch use pages of 2 MiB.

    By default glibc returns each large freed block to the kernel, and every step then has page faults for its
    activations: 40,000 of them, 3-4 % of the step time of an encoder with 4 layers of width 256. Pages of 2 MiB save
    another 3 %; many kernels provide them only on request.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first allocation
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only; a preloaded allocator may not have it
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


_pids_with_runs: set[int] = set()  # this process and its ancestors by fork, if they have started a run


def reset() -> None:
    """Clear Accelerate's global state, such as the precision of an earlier run; keep the process group."""
    of_accelerate.reset_state(processes=not torch.distributed.is_initialized())


@contextmanager
def freed_after() -> Iterator[None]:
    """After the block, the process can start another run: its folder lock and Accelerate's state are gone."""
    try:
        yield
    finally:
        folder_lock.release_all()
        reset()
