"""Forward and backward pass of BERT-base on random documents: what each choice of attention, precision and compiling
costs, without data, optimizer and loop.

Most are choices that no flag of a recipe has, beside those of the recipe.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.gpu_benchmarks import TINY
from shared.encoders.attention import use_packed_attention
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import Packing
from shared.models.trainable import called_layers
from shared.options.data_options import ModelOptions
from shared.speed.layers import use_activation_dtype
from shared.text.tokenized import Rows

MASKED = 0.15
WARMUP, TIMED = 4, 12  # passes


@dataclass(frozen=True)
class Pass:
    """One way to compute the pass."""

    name: str
    all_bf16: bool = False
    """Weights and hidden states in bf16; otherwise float32 under autocast."""
    bf16_activations: bool = False
    """--activation_dtype bf16: weights in float32, hidden states in bf16, no autocast."""
    packed: bool = True
    """Documents end to end, with attention by their ends; otherwise one per row, which no document fills short."""
    cudnn: bool = False
    """Attention of cuDNN."""
    compiled: str = "layers"
    """layers, whole, nothing."""
    dynamic: bool = True
    """Symbolic sizes."""


PASSES = (
    Pass("as the recipe: autocast, FlashAttention, layers compiled with symbolic sizes"),
    Pass("not compiled", compiled="nothing"),
    Pass("fixed sizes", dynamic=False),
    Pass("rows, attention of cuDNN, fixed sizes", packed=False, cudnn=True, dynamic=False),
    Pass("activations in bf16 (--activation_dtype bf16)", bf16_activations=True),
    Pass("activations in bf16, fixed sizes", bf16_activations=True, dynamic=False),
    Pass("all in bf16", all_bf16=True),
    Pass("all in bf16, fixed sizes", all_bf16=True, dynamic=False),
    Pass("all in bf16, rows, attention of cuDNN, fixed sizes", True, packed=False, cudnn=True, dynamic=False),
    Pass("whole model compiled, fixed sizes", compiled="whole", dynamic=False),
    Pass("all in bf16, whole model compiled, fixed sizes", True, compiled="whole", dynamic=False),
)
# What a machine without a GPU computes, not compiled.
TOY = [each for each in PASSES if each.compiled == "nothing" or each.bf16_activations]


def run(folder: Path, toy: bool) -> None:
    """Measure PASSES, and write FOLDER/passes.json after each, so that an interrupted run keeps its results."""
    few: Sequence[Pass]
    documents, length, few = (2, 16, [replace(each, compiled="nothing") for each in TOY]) if toy else (64, 512, PASSES)
    found: list[dict[str, Any]] = []
    for each in few:
        try:
            found.append({"name": each.name} | measure(each, documents, length, toy))
        except Exception as error:  # one that cannot be had here must not hide the others
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            found.append({"name": each.name, "problem": reason[:200]})
        print(found[-1], flush=True)
        partly = folder / "passes.json.partly"
        partly.write_text(json.dumps(found))
        partly.replace(folder / "passes.json")


def measure(how: Pass, documents: int, length: int, toy: bool) -> dict[str, float]:
    """Median milliseconds of a pass, tokens per second, and peak bytes of memory on a GPU."""
    from transformers import BertConfig, BertForMaskedLM

    torch._dynamo.reset()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = TINY | {"vocab_size": 400} if toy else {"vocab_size": 30528}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**sizes, **without_dropout))
    predict_only_masked(model, packing=False)
    model.to(device, torch.bfloat16 if how.all_bf16 else torch.float32).train()
    if how.packed:
        use_packed_attention(model, device, "bf16")
    if how.bf16_activations:
        use_activation_dtype(ModelOptions(activation_dtype="bf16"), model)
    called: Callable[..., Any] = model
    if how.compiled == "layers":
        for layer in called_layers(model):
            layer.compile(dynamic=how.dynamic)
    elif how.compiled == "whole":
        called = torch.compile(model, dynamic=how.dynamic)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(times(how, called, model, *batch(how, documents, length, sizes, device)))
    peak = {"peak_memory_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}
    return {"ms": seconds * 1e3, "rate": documents * length / seconds} | peak


def times(
    how: Pass, called: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], labels: torch.Tensor
) -> list[float]:
    """Seconds of each timed pass."""
    kind = labels.device.type
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    found = []
    for i in range(WARMUP + TIMED):
        wait()
        started = time.perf_counter()
        without = how.all_bf16 or how.bf16_activations
        autocast = nullcontext() if without else torch.autocast(kind, torch.bfloat16)
        with autocast, sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if how.cudnn else nullcontext():
            loss = F.cross_entropy(called(**inputs).logits.float(), labels)
        loss.backward()
        wait()
        if i >= WARMUP:
            found.append(time.perf_counter() - started)
        for parameter in model.parameters():
            parameter.grad = None
    return found


def batch(
    how: Pass, documents: int, length: int, sizes: dict[str, int], device: torch.device
) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of the model, and the labels int64 [masked] at the masked tokens."""
    generator, total = torch.Generator().manual_seed(0), documents * length
    ids = torch.randint(5, sizes["vocab_size"], (total,), generator=generator)
    masked = torch.randperm(total, generator=generator)[: int(total * MASKED)].sort()[0]
    labels = torch.randint(5, sizes["vocab_size"], (len(masked),), generator=generator)
    inputs: dict[str, Any]
    if how.packed:
        collate, lengths = Packing(), np.full(documents, length)
        inputs = collate(Rows(lengths, ids.numpy(), masked=masked.numpy()))
    else:
        inputs = {"masked": masked, "input_ids": ids.view(documents, length)}
    inputs = send_to_device(inputs, device)
    return inputs, labels.to(device)
