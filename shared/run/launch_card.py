"""The launch card: the resolved settings of a run, printed once before it starts."""

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.checkpoints.progress import Progress
from shared.config.meaning import Meaning, fields_with
from shared.config.options import Options, shown
from shared.errors import count_of
from shared.optimization.optimizers import peak_learning_rate, skips_on_device, warmup_steps
from shared.plan.batches import Plan
from shared.processes.collectives import gather


def print_card(accelerator: Any, *run: Any, **rows: object) -> None:
    """Print the launch card once; `run` and `rows` are the other arguments of `launch_card`."""
    accelerator.print(launch_card(accelerator, *run, rows))  # type: ignore[call-arg]


def launch_card(
    accelerator: Any,
    config: Options,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    checkpoint: Path | None,
    rows: Mapping[str, object],
) -> str:
    """The card, one aligned line per row: hardware, batch equation, steps, the recipe's own `rows`, then notes.

    Call it on every process.
    """
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    hosts = gather(accelerator, (socket.gethostname(), accelerator.is_local_main_process))
    multi_machine, folder = sum(first for _, first in hosts) > 1, config.output_dir
    if multi_machine:  # `run_folder.open_run` has checked that the flag is right
        folder += ", each machine's own" if config.save_on_each_node else ", shared by the machines"
    card = {
        **hardware(accelerator, config.activation_dtype),
        **({"machines": machines(hosts)} if multi_machine else {}),
        **gradients(config.gradient_compression, accelerator.num_processes),
        "batch": batch_equation(plan, progress.step),
        **({"filling": filling(plan, progress.step)} if plan.fixed_shapes else {}),
        "steps": f"{plan.total_steps:,} of {plan.global_batch_size} samples ("
        f"{count_of(plan.total_samples / plan.num_samples, 'epoch')} of {plan.num_samples:,}), seed {plan.seed}",
        "learning rate": f"{peak_learning_rate(config):g} at its peak, {config.lr_scheduler_type}, "
        f"{count_of(warmup_steps(config, plan.total_steps), 'step')} of warm-up",
        "parameters": f"{trained:,} trained by {config.optim}",
        **rows,
        "tracker": shown(config.report_to),
        "output": f"{folder}, " + (f"resumed from {checkpoint.name}" if checkpoint else "from the start"),
    }
    if progress.step < plan.total_steps and plan.refined(progress.step):
        card["note"] = (
            "a step has more micro-batches than the config requires, so that every process has work: dropout and batch "
            "norm now depend on the number of processes (--micro_batches_per_step N fixes the number)"
        )
    if without_effect := sizes_without_effect(config):
        card["note on sizes"] = f"no effect, because the pretrained model has its own sizes: {without_effect}"
    if not skips_on_device(optimizer):
        card["note on --optim"] = "it cannot skip updates on the device, so the host waits for each gradient norm"
    width = max(map(len, card))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in card.items())


def sizes_without_effect(config: Options) -> str:
    """The flags for sizes of a new model that have no effect, because the config names a pretrained model."""
    if getattr(config, "model_name_or_path", None) is None:  # not all recipes have this field
        return ""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name: getattr(config, name) for name in sorted(fields_with(type(config), Meaning.SIZE_OF_NEW_MODEL))}
    return ", ".join(f"--{name} {shown(value)}" for name, value in changed.items() if value != defaults[name])


def hardware(accelerator: Any, activation_dtype: str | None) -> dict[str, str]:
    """The rows on processes, device and precision."""
    device, processes = accelerator.device, accelerator.num_processes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads each"
    wrapper = "FSDP2" if accelerator.is_fsdp2 else "DDP"
    return {
        "processes": f"{processes}, {wrapper} over {torch.distributed.get_backend()}" if processes > 1 else "1",
        "device": f"{device.type}, {name}",
        "precision": precision(accelerator, activation_dtype),
    }


def machines(hosts: Sequence[tuple[str, bool]]) -> str:
    """`2: node-a (ranks 0-7), node-b (ranks 8-15)`, from (host, whether it is the first rank there) of each rank."""
    starts = [rank for rank, (_, first) in enumerate(hosts) if first]
    found = []
    for start, end in zip(starts, [*starts[1:], len(hosts)], strict=True):
        found.append(f"{hosts[start][0]} (rank{f's {start}-{end - 1}' if end - start > 1 else f' {start}'})")
    return f"{len(found)}: {', '.join(found[:8])}{', ...' * (len(found) > 8)}"


def gradients(compression: str, processes: int) -> dict[str, str]:
    """The row on gradient compression; none without it."""
    if compression == "none":
        return {}
    effect = "sent and summed" if processes > 1 else "no effect on one process; on several, sent and summed"
    return {"gradients": f"{effect} in {compression}"}


def precision(accelerator: Any, activation_dtype: str | None) -> str:
    """The precision of the forward and backward passes; the weights are always float32."""
    if activation_dtype:
        return f"{activation_dtype} activations without autocast, weights fp32"
    return {"no": "fp32"}.get(accelerator.mixed_precision, f"{accelerator.mixed_precision}, weights fp32")


def batch_equation(plan: Plan, step: int) -> str:
    """The global batch as a product: `global batch 256 = 2 processes x ~4 micro-batches of <= 4,096 tokens`."""
    pieces = len(plan.cut(min(step, plan.total_steps - 1)))
    return product(
        plan.global_batch_size, plan.num_processes, pieces / plan.num_processes, plan.max_tokens, plan.max_samples
    )


def filling(plan: Plan, step: int) -> str:
    """The row on --fixed_shapes: what the filling costs, and which flag changes that."""
    share = plan.filling(min(step, plan.total_steps - 1))
    return f"{share:.0%} of the tokens of a step; --max_tokens_per_micro_batch and --global_batch_size change that"


def product(size: int, processes: int, each: float | None, max_tokens: int | None, max_samples: int | None) -> str:
    """The same equation from its factors; `each`: micro-batches per process, None while the data is not known."""
    limits = [count_of(max_tokens, "token")] if max_tokens else []
    limits += [count_of(max_samples, "sample")] if max_samples else []
    within = f" of <= {' and '.join(limits)}" if limits else ""
    pieces = "micro-batches" if each is None else f"~{each:g} micro-batch{'es' * (each != 1)}"
    return f"global batch {size} = {count_of(processes, 'process', 'processes')} x {pieces}{within}"
