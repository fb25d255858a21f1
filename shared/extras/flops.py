"""Model FLOP utilisation: the operations that a model needs, over those that the device can do.

MFU as in PaLM's appendix B (Chowdhery et al., 2022): floating-point operations of forward and backward pass that the
real tokens need, over those that the devices could have done in the same time. Recomputation and padding do not count.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.extras.costs import positions_of
from shared.models.linear_layers import linear
from shared.monitoring.hooks import Hook
from shared.plan.batches import MicroBatch
from shared.plan.draws import Ints
from shared.run.warm_up import discarded

SIDES = {"cpu": (512, 768), "cuda": (8192,)}  # of the square matrices that measure the peak
REPEATS = 6  # of each product; on a busy CPU a smaller one is likelier to run undisturbed
GAIN = 1.3  # of bf16 over float32 in matrix products, from which on the launch card mentions it
PASSES = 3  # one product of the forward pass, and two in the backward pass for each


class Mfu(Hook):
    """Measures how much of what the devices can do a run uses: `mfu` in metrics.jsonl."""

    def prepared(self, run: Any) -> None:
        """Count the operations of a forward pass, which is discarded, and measure the device."""
        self.run, self.is_sequence = run, run.lengths is not None
        self.per_token_squared = attention_flops(run.accelerator.unwrap_model(run.model)) if self.is_sequence else 0
        # Before the warm-up pass: FSDP needs a backward pass after this forward pass.
        with discarded(run.accelerator, run.model), run.accelerator.no_sync(run.model):
            first = run.plan.micro_batches(0)[0]
            self.per_position = count_flops(run.model, lambda: run.compute_loss(first), self.is_sequence)
        self.peak = peak_of_device(run)
        self.fed: list[Ints] = []  # samples since the last reading

    def counted(self, micro_batch: MicroBatch) -> None:
        if self.is_sequence and micro_batch.counted:
            self.fed.append(micro_batch.samples)

    def measured(self) -> dict[str, float]:
        """The operations that the real samples or tokens since the last reading needed."""
        monitor = self.run.monitor
        flops = self.per_position * (monitor.tokens if self.is_sequence else monitor.samples)
        if self.fed:
            lengths = self.run.lengths[np.concatenate(self.fed)].astype(np.int64)
            flops += self.per_token_squared * int((lengths**2).sum())
        return {"flops": flops, "peak_flops": self.peak}

    def figures(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """The share of what the devices could have done in the time of the steps; the next reading begins here."""
        self.fed = []
        return {"mfu": rows["flops"].sum() / rows["peak_flops"].sum() / rows["seconds"].mean()}


def peak_of_device(run: Any) -> float:
    """--peak_tflops, or the measured peak; then the launch card also says what a CPU gains from bf16."""
    config, accelerator = run.config, run.accelerator
    if config.peak_tflops:
        return config.peak_tflops * 1e12
    precision = getattr(config, "activation_dtype", None) or accelerator.mixed_precision
    peak = measure_peak(accelerator.device, precision)
    if accelerator.device.type != "cpu" or precision != "no":
        return peak
    if not any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items()):
        return peak  # without instructions for it, bf16 is slower, and measuring it takes half a second
    if (gain := measure_peak(accelerator.device, "bf16") / peak) >= GAIN:
        run.card["note on precision"] = (
            f"matrix products are {gain:.1f} times as fast here with --mixed_precision bf16, which rounds them "
            "(docs/faster_runs.md says when that is safe)"
        )
    return peak


def count_flops(model: nn.Module, forward: Callable[[], object], is_sequence: bool = True) -> float:
    """Operations of forward and backward pass per position of a batch: linear layers and convolutions, 2 per weight.

    A frozen weight saves one product of the backward pass, and a second one if nothing below it is trained.

    Args:
        forward: a forward pass of `model` with gradients and without a backward pass, which may compute layers again.
            It is not compiled: compiled layers do not run the hooks that count.
        is_sequence: see `positions_of`.
    """
    operations = positions = 0

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal positions
        positions += positions_of(args, kwargs, is_sequence)

    def count(layer: Any, args: tuple[Any, ...], output: Any) -> None:
        nonlocal operations
        if layer.training and isinstance(output, Tensor):  # a router of experts gives several
            product = 2 * output.numel() * math.prod(layer.weight.shape[1:])  # under FSDP, too, of the whole weight
            operations += PASSES * product
            if not layer.weight.requires_grad:
                operations -= product * (1 if args[0].requires_grad else 2)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    forward()
    for handle in handles:
        handle.remove()
    return operations / positions if positions else 0.0


def attention_flops(model: nn.Module) -> int:
    """Operations of forward and backward pass per token and per token of its sequence: 12 x layers x width.

    0 where the model's config lacks layers or width. Local attention is counted as full attention, and frozen layers as
    trained ones. A last layer that computes only the tokens that the head reads is left out.
    """
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0) - getattr(model, "last_layer_is_short", False)
    return 4 * PASSES * layers * getattr(config, "hidden_size", 0)


def measure_peak(device: torch.device, precision: str) -> float:
    """Operations per second of the device in a large matrix product: the best of several measurements.

    The matrices are random, since zeros take less power and run faster.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # leaves the generators of the run unchanged
    rate = 0.0
    for side in SIDES.get(device.type, SIDES["cuda"]):
        a = torch.rand(side, side, generator=generator, device=device).to(dtype)
        for _ in range(REPEATS):
            begun = time.perf_counter()
            linear(a, a, None)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
            rate = max(rate, 2 * side**3 / (time.perf_counter() - begun))
    return rate
