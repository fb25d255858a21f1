"""The launch card: the resolved settings of a run, printed once before it starts."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shared.checkpoints.progress import Progress
from shared.compat import of_torch
from shared.errors import aligned, count_of, listed
from shared.optimization.optimizers import inner, warmup_steps
from shared.plan.batches import Plan
from shared.processes.collectives import gather


def launch_card(run: Any, rows: Mapping[str, object]) -> str:
    """The card of a run, one aligned line per row: hardware, batch equation, steps, its own `rows`, then notes.

    Call it on every process.
    """
    accelerator, config, plan, progress, optimizer = run.accelerator, run.config, run.plan, run.progress, run.optimizer
    hosts = gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
    begins = f"resumed from {run.checkpoint.name}" if run.checkpoint else "from the start"
    card = {
        **hardware(accelerator, run.strategy.name),
        **({"machines": machines(hosts)} if sum(first for _, first in hosts) > 1 else {}),
        "batch": batch_equation(plan, progress.step),
        "steps": f"{plan.total_steps:,} of {plan.global_batch_size} samples ("
        f"{count_of(plan.total_samples / plan.num_samples, 'epoch')} of {plan.num_samples:,}), seed {plan.seed}",
        "learning rate": f"{config.peak_learning_rate():g} at its peak, {config.lr_scheduler_type}, "
        f"{count_of(warmup_steps(config, plan.total_steps), 'step')} of warm-up",
        "parameters": trained_by(inner(optimizer)),
        **rows,
        "output": f"{config.output_dir}, {begins}",
    }
    card |= notes_on_processes(plan, progress)
    if not of_torch.reads_found_inf(inner(optimizer)):
        card["note on --optim"] = "it cannot skip updates on the device, so the host waits for each gradient norm"
    return aligned(card)


def notes_on_processes(plan: Plan, progress: Progress) -> dict[str, str]:
    """The rows on what depends on the number of processes in the remaining steps; none if nothing does."""
    start, notes = progress.step, {}
    affected = "dropout, batch norm and mixup"
    before, now, first = progress.world_size, plan.num_processes, plan.first_processes
    if plan.cut_otherwise(start, 1, 1):
        why = "so that every process has work" if now >= first else f"as on the {first} processes of the first launch"
        notes["note"] = (
            f"some steps have more micro-batches than the config requires, {why}: {affected} depend on the number of "
            "processes there"
        )
    if before not in (None, now):
        effect = "equal up to rounding"
        if plan.depends_on_processes:
            effect = f"another run, because {plan.depends_on_processes}"
        elif plan.cut_otherwise(start, before, first):
            effect = (
                f"some steps have other micro-batches; equal up to rounding without {affected}, with them another run"
            )
        notes["resumed on"] = f"{count_of(now, 'process', 'processes')}, saved on {before}: {effect}"
    return notes


def hardware(accelerator: Any, strategy: str) -> dict[str, str]:
    """The rows on processes, device and precision; `strategy` is how the processes hold the model, such as DDP."""
    device, processes = accelerator.device, accelerator.num_processes
    threads = count_of(torch.get_num_threads(), "thread")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} each"
    precision = "fp32" if accelerator.mixed_precision == "no" else f"{accelerator.mixed_precision}, weights fp32"
    return {
        "processes": f"{processes}, {strategy} over {torch.distributed.get_backend()}" if processes > 1 else alone(),
        "device": f"{device.type}, {name}",
        "precision": precision,
    }


def trained_by(optimizer: torch.optim.Optimizer) -> str:
    """`1,290 trained by sgd, 330 by adamw`: the number of parameters of each optimizer."""
    found: list[str] = []
    for each in getattr(optimizer, "optimizers", [optimizer]):
        values = sum(p.numel() for group in each.param_groups for p in group["params"])
        found.append(f"{values:,}{'' if found else ' trained'} by {type(each).__name__.lower()}")
    return ", ".join(found)


def alone() -> str:
    """The number of processes of a run with one, and whether its launcher was asked for more.

    `accelerate launch` sets MASTER_ADDR if num_processes is more than one, but with some values of distributed_type it
    starts one process, and says nothing.
    """
    if "MASTER_ADDR" not in os.environ or "WORLD_SIZE" in os.environ:
        return "1"
    return (
        "1, although MASTER_ADDR is set, as for several: with distributed_type MULTI_CPU or NO, accelerate launch "
        "starts only one; use accelerate_configs/multi_cpu.yaml"
    )


def machines(hosts: Sequence[tuple[str, bool]]) -> str:
    """`2: node-a (ranks 0-7), node-b (ranks 8-15)`, from (host, whether it is the first rank there) of each rank."""
    starts = [rank for rank, (_, first) in enumerate(hosts) if first]
    found = []
    for start, end in zip(starts, [*starts[1:], len(hosts)], strict=True):
        found.append(f"{hosts[start][0]} (rank{f's {start}-{end - 1}' if end - start > 1 else f' {start}'})")
    return f"{len(found)}: {listed(found, 8)}"


def batch_equation(plan: Plan, step: int) -> str:
    """The global batch as a product: `global batch 256 = 2 processes x 4 micro-batches of ~32 samples (<= 512 tokens)`.

    The sizes are those of `step`, or of the last step with all samples; `~` marks a mean.
    """
    full = plan.total_samples // plan.global_batch_size
    shares = plan.micro_batches_of_all(min(step, max(full, 1) - 1))
    sizes = [len(piece.samples) for mine in shares for piece in mine if piece.counted]
    same_count = len({len(mine) for mine in shares}) == 1
    each = f"{'' if same_count else '~'}{len(sizes) / len(shares):.3g} micro-batch{'es' * (len(sizes) > len(shares))}"
    size = f"{'' if len({*sizes}) == 1 else '~'}{count_of(round(sum(sizes) / len(sizes)), 'sample')}"
    limits = ((plan.max_tokens, "token"), (plan.max_samples, "sample"))
    within = " and ".join(count_of(most, noun) for most, noun in limits if most)
    processes = count_of(plan.num_processes, "process", "processes")
    return f"global batch {plan.global_batch_size} = {processes} x {each} of {size}" + f" (<= {within})" * bool(within)
