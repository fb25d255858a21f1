"""Model FLOP utilisation: the operations that a model needs, over those that the device can do.

MFU as in PaLM's appendix B (Chowdhery et al., 2022): floating-point operations of forward and backward pass that the
real tokens need, over those that the devices could have done in the same time. Recomputation and padding do not count.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.extras.costs import is_trained, positions_of
from shared.models.linear_layers import linear
from shared.models.trainable import compiled, is_short
from shared.monitoring.hooks import Hook

SIDES = {"cpu": (512, 768), "cuda": (8192,)}  # of the square matrices that measure the peak
REPEATS = 6  # of each product; on a busy CPU a smaller one is likelier to run undisturbed
LONGEST = 0.3  # seconds; a CPU without bf16 instructions would take four
GAIN = 1.3  # of bf16 over float32 in matrix products, from which on the launch card mentions it
PASSES = 3  # one product of the forward pass, and two in the backward pass for each


class Mfu(Hook):
    """Measures how much of what the devices can do a run uses: `mfu` in metrics.jsonl."""

    def prepared(self, run: Any) -> None:
        """Measure the device, unless --peak_tflops is given, and note on the launch card what a CPU gains from bf16."""
        config, accelerator = run.config, run.accelerator
        precision = config.activations or accelerator.mixed_precision
        if config.peak_tflops:
            self.peak = config.peak_tflops * 1e12
            return
        self.peak = measure_peak(accelerator.device, precision)
        if accelerator.device.type != "cpu" or precision != "no":
            return
        if not any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items()):
            return  # without instructions for it, bf16 is slower, and measuring it takes half a second
        if (gain := measure_peak(accelerator.device, "bf16") / self.peak) >= GAIN:
            run.card["note on precision"] = (
                f"matrix products are {gain:.1f} times as fast here with --mixed_precision bf16, which rounds them "
                "(docs/faster_runs.md says when that is safe)"
            )

    def begun(self, run: Any) -> None:
        """Count the operations of the first forward pass."""
        self.run, self.is_sequence = run, run.lengths is not None
        self.per_token_squared = attention_flops(run.accelerator.unwrap_model(run.model)) if self.is_sequence else 0
        self.counter = FlopCounter(run.model, self.is_sequence)

    def measured(self) -> dict[str, float]:
        """The operations that the real samples or tokens since the last reading needed."""
        counter, monitor = self.counter, self.run.monitor
        per_position = (PASSES * counter.stop() - counter.saved) / max(counter.positions, 1)
        flops = per_position * (monitor.tokens if self.is_sequence else monitor.samples)
        return {"flops": flops + self.per_token_squared * monitor.tokens_squared, "peak_flops": self.peak}

    def figures(self, rows: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """The share of what the devices could have done in the time of the steps."""
        return {"mfu": rows["flops"].sum() / rows["peak_flops"].sum() / rows["seconds"].mean()}


class FlopCounter:
    """Counts the multiplications of the first forward pass in training: linear layers and convolutions, 2 per weight.

    Counting ends with that forward pass, because layers that are computed again in the backward pass call the same
    hooks. A forward pass without gradients is not counted. Compiled layers do not run the hooks that count. So the
    first batch of a compiled model goes through it once before training, not compiled and without gradients. This
    changes neither the random state nor the averages of shared/models/batch_norm.py.

    Attributes:
        counted: operations of that forward pass.
        saved: operations that the backward pass saves because weights are frozen: one product for the weight, and one
            for its input if nothing below it is trained.
        positions: of the batch of that forward pass, see `positions_of`.
    """

    def __init__(self, model: nn.Module, is_sequence: bool = True) -> None:
        self.counted = self.saved = self.positions = 0
        self.is_sequence = is_sequence
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]

    def stop(self) -> int:
        """Stop counting, and return the count."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self.counted

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_trained(model):
            return
        self.stop()  # this hook
        self.positions = positions_of(args, kwargs, self.is_sequence)
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        self._handles = [layer.register_forward_hook(self._count) for layer in layers]
        if not compiled(model):
            self._handles.append(model.register_forward_hook(self._end))
            return
        devices = {p.device for p in model.parameters() if p.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            getattr(model, "module", model).forward(*args, **kwargs)
        self.stop()

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.stop()

    def _count(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if module.training:
            assert isinstance(module.weight, Tensor)
            # Under FSDP, too, this is the shape of the whole weight.
            product = 2 * output.numel() * math.prod(module.weight.shape[1:])
            self.counted += product
            if not module.weight.requires_grad:
                below = args[0].requires_grad or not torch.is_grad_enabled()  # a compiled model is counted without
                self.saved += product * (1 if below else 2)


def attention_flops(model: nn.Module) -> int:
    """Operations of forward and backward pass per token and per token of its sequence: 12 x layers x width.

    0 where the model's config lacks layers or width. Local attention is counted as full attention, and frozen layers as
    trained ones. A last layer that computes only the tokens that the head reads is left out.
    """
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0) - is_short(model)
    return 4 * PASSES * layers * getattr(config, "hidden_size", 0)


def measure_peak(device: torch.device, precision: str) -> float:
    """Operations per second of the device in a large matrix product: the best of several measurements.

    The matrices are random, since zeros take less power and run faster.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # leaves the generators of the run unchanged
    rate, begun = 0.0, time.perf_counter()
    for side in SIDES.get(device.type, SIDES["cuda"]):
        a = torch.rand(side, side, generator=generator, device=device).to(dtype)
        for _ in range(REPEATS):
            started = time.perf_counter()
            if rate and started - begun > LONGEST:
                return rate
            linear(a, a, None)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
            rate = max(rate, 2 * side**3 / (time.perf_counter() - started))
    return rate
