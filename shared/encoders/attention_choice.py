"""`--attention`: the kernels that compute the attention of packed documents, given by name or chosen by their time.

With `auto`, the main process times each kernel that works on this machine: forward and backward pass, on random numbers
with the documents of the run's first step. A kernel whose result differs from that of the usual one by more than
rounding is left out. Layers with a local window and layers without one choose separately. The choice replaces `auto` in
the config of the run, so that a resumed run takes the same kernels.

FlashAttention-3 replaces torch's own FlashAttention in the whole process (torch.nn.attention). So the layers of a run
that use FlashAttention all use the same version.
"""

import dataclasses
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.config.options import Options
from shared.encoders.attention import attend
from shared.encoders.packing import (
    FLASH_3,
    activate_flash_3,
    padded_attention,
    repeat_kv_heads,
    varlen_attention,
    why_not_varlen,
)
from shared.errors import UserError
from shared.options.extra_options import ExtraOptions
from shared.plan.loading import Loader
from shared.processes.collectives import gather, on_main_process
from shared.speed.self_check import TOLERANCE

Config = TypeVar("Config", bound=Options)
AUTO = ("auto",)
HOPPER = 9  # the generation of GPUs for which FlashAttention-3 is written
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The order in a compiled layer, where tracing may reject cuDNN. Elsewhere no kernel replaces it unnoticed."""
REPEATS, ENOUGH = 5, 2.0  # timings, of which the least counts, after one that does not count; seconds for all
GAIN = 0.05  # the usual kernel stays if no other saves this share of its time
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Window = int | None  # of a local layer; None in a global one
Outcome = float | str  # the seconds of a kernel, or why it cannot be used


def use_attention_of_run(run: Any, model: Any, loader: Loader) -> None:
    """Make `model` use the kernels of --attention. Call it on every process, before `run.prepare`.

    The settings of the `TrainingRun` then name the kernels that were chosen instead of `auto`, and its launch card has
    a row about them. Without --attention nothing changes.

    Raises:
        UserError: a kernel does not work with this model or on this machine, or changes the result; or the model is
            not packed.
    """
    accelerator, config = run.accelerator, run.config
    if (names := config.attention) is None:
        return
    layers = layers_by_window(model)
    check(names, config, model, layers, loader.plan.packed)
    device, precision = accelerator.device, config.activation_dtype or accelerator.mixed_precision
    mine = {name: why_not(name, config, model.config, device, precision) for name in KERNELS}
    everywhere = gather(accelerator, mine)
    reasons = {name: next((each[name] for each in everywhere if each[name]), "") for name in KERNELS}
    usual = "padded" if reasons["varlen"] else "varlen"
    tried = dict.fromkeys([usual, *KERNELS] if names == AUTO else [usual, *names])

    def measure() -> dict[Window, dict[str, Outcome]]:
        pieces = loader.plan.cut(0)
        ends = pieces[:1] + pieces[1:][-1:]  # with the longest and with the shortest documents
        inputs = [Inputs.of_batch(loader.one(piece)[1], model.config, device, precision) for piece in ends]
        return {window: outcomes(tried, usual, reasons, inputs, window) for window in layers}

    found = on_main_process(accelerator, measure)
    row = ""
    if names == AUTO:
        names = fastest(found, layers, usual)
        row = "".join(f"; {layer_name(window)}: {shown_times(found[window])}" for window in layers)
        run.config = dataclasses.replace(config, attention=names)
    for window in layers:
        if isinstance(problem := found[window][name := kernel(names, window)], str):
            raise UserError(
                f"--attention {name} cannot be used ({problem}): begin a run with auto, or without the flag"
            )
    set_attention(model, names)
    run.card["attention"] = " in global layers, ".join(names) + " in local ones" * (len(names) - 1) + row


def layers_by_window(model: Any) -> dict[Window, int]:
    """The number of attention layers by their window: {None: global layers, 65: local layers of ModernBERT}."""
    found = Counter(module.sliding_window for module in model.modules() if hasattr(module, "sliding_window"))
    return dict(found) or {None: model.config.num_hidden_layers}


def check(names: Sequence[str], config: ExtraOptions, model: Any, layers: Mapping[Window, int], packed: bool) -> None:
    """Check --attention before anything is timed.

    Raises:
        UserError: gives the reason and the fix.
    """
    flag = f"--attention {' '.join(names)}"
    if not packed:
        raise UserError(f"{flag} has no effect, because a {type(model).__name__} cannot be packed: leave it out")
    if len(names) > 1 and set(layers) <= {None}:
        raise UserError(f"{flag}: a {type(model).__name__} has no local layers, so give one name")
    if len(names) > 2 or (len(names) > 1 and "auto" in names):
        raise UserError(f"{flag}: give auto, or one name, or that for global layers and that for local ones")
    if {"flash3"} < set(names) & {"flash3", "varlen", "cudnn"}:
        raise UserError(f"{flag}: FlashAttention-3 replaces varlen in all layers, so name only one of them")
    if names == AUTO and config.auto_micro_batch:
        raise UserError(f"{flag} does not work with --auto_micro_batch: give --max_tokens_per_micro_batch instead")


def why_not(name: str, config: Options, model_config: Any, device: torch.device, precision: str) -> str:
    """Why a kernel cannot compute the attention of a model on this machine; empty if it can be tried."""
    if name == "padded":
        return ""
    if name == "documents":
        waits = "it waits for the GPU" if device.type != "cpu" else ""
        return waits or ("it cannot be compiled" if config.torch_compile else "")
    if (reason := why_not_varlen(model_config, device, precision)) or name == "varlen":
        return reason
    generation = torch.cuda.get_device_capability(device)[0]
    if name == "cudnn":
        return "it is not deterministic" if config.deterministic else ""
    if generation != HOPPER:
        return "it is for Hopper GPUs"
    if FLASH_3 not in getattr(torch.nn.attention, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} cannot use it"
    return "" if importlib.util.find_spec("flash_attn_interface") else "no package flash_attn_interface"


# Kernels, as transformers' attention functions: query [1, heads, T, width], key and value alike -> [1, T, heads, width]


def attention_by_length(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One call for each run of neighbouring documents of the same length, so nothing is padded.

    The query may have fewer tokens than key and value: see `varlen_attention`.
    """
    key, value = repeat_kv_heads(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sizes = zip(cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist(), strict=True)
    begin_q = begin_k = 0
    found = []
    for (length_q, length_k), equal in groupby(sizes):
        count = len(list(equal))
        if not length_q:
            begin_k += count * length_k
            continue
        end_q, end_k = begin_q + count * length_q, begin_k + count * length_k
        q = query[0, :, begin_q:end_q].unflatten(1, (count, length_q)).transpose(0, 1)
        k, v = (p[0, :, begin_k:end_k].unflatten(1, (count, length_k)).transpose(0, 1) for p in (key, value))
        mask = None
        if sliding_window is not None and length_k > sliding_window:
            place = torch.arange(length_k, device=query.device)
            mask = (place[:, None] - place).abs() < sliding_window
        found.append(attend(q, k, v, mask, dropout, scale).transpose(1, 2).flatten(0, 1))
        begin_q, begin_k = end_q, end_k
    return torch.cat(found)[None], None


def cudnn_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_k: Tensor,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """cuDNN's attention if all documents have the same length and fit in the window; else `varlen_attention`.

    With a mask, the backward pass of cuDNN's attention gives NaN for some lengths (pytorch#196678). Without a mask only
    documents of the same length can be computed together.
    """
    documents, (_, heads, total, width) = len(cu_seq_lens_k) - 1, query.shape
    fits = sliding_window is None or max_length_k <= sliding_window
    if not fits or total != key.shape[2] or total != documents * max_length_k:
        more |= {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, "sliding_window": sliding_window}
        return varlen_attention(module, query, key, value, attention_mask, scaling=scaling, **more)
    key, value = repeat_kv_heads(query, key, value)
    q, k, v = (p[0].unflatten(1, (documents, max_length_k)).transpose(0, 1) for p in (query, key, value))
    with sdpa_kernel(CUDNN_FIRST if torch.compiler.is_compiling() else CUDNN_FIRST[:1], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, scale=width**-0.5 if scaling is None else scaling)
    return out.transpose(1, 2).reshape(1, total, heads, width), None


KERNELS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "padded": padded_attention,
    "documents": attention_by_length,
    "varlen": varlen_attention,
    "flash3": varlen_attention,
    "cudnn": cudnn_attention,
}


def kernel(names: Sequence[str], window: Window) -> str:
    """The kernel of a layer with this window; `names` are those of --attention."""
    return names[0] if window is None else names[-1]


def set_attention(model: Any, names: Sequence[str]) -> None:
    """Make `model` use these kernels: one for all layers, or one for global and one for local layers."""
    from transformers import AttentionInterface

    def attention(module: nn.Module, *args: Any, sliding_window: int | None = None, **more: Any) -> tuple[Tensor, None]:
        return KERNELS[kernel(names, sliding_window)](module, *args, sliding_window=sliding_window, **more)

    name = "_".join(("packed", *names)).replace("flash", "fa")  # transformers would look for a kernel of such a name
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    activate_flash_3("flash3" in names)


# Choosing


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random inputs of an attention layer, with the documents of a micro-batch."""

    tensors: list[Tensor]
    """query [1, heads, T, width], key and value, and the gradient of the output [1, T, heads, width]."""
    boundaries: dict[str, Any]

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], config: Any, device: torch.device, precision: str) -> "Inputs":
        """For a batch of `Packing`, a model with this `PretrainedConfig`, and "bf16", "fp16" or full precision."""
        heads, total = config.num_attention_heads, batch["input_ids"].shape[1]
        shared = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        generator = torch.Generator(device).manual_seed(0)
        sizes = (
            (1, heads, total, width),
            (1, shared, total, width),
            (1, shared, total, width),
            (1, total, heads, width),
        )
        dtype = DTYPES.get(precision, torch.float32)
        tensors = [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]
        for tensor in tensors[:3]:
            tensor.requires_grad_()
        return cls(tensors, {name: batch[name] for name in BOUNDARIES})


def outcomes(
    names: Iterable[str],
    usual: str,
    reasons: Mapping[str, str],
    inputs: Sequence[Inputs],
    window: Window,
) -> dict[str, Outcome]:
    """The time of each kernel in a layer with this window, or why it cannot be used.

    Args:
        names: the kernels to try.
        usual: the kernel with which the results are compared.
        reasons: why a kernel does not work at all; empty if it can be tried.
        inputs: the seconds are the sum over these.
        window: of the layer.
    """
    found: dict[str, Outcome] = {}
    expected = [compute(usual, each, window) for each in inputs]
    for name in names:
        found[name] = reasons[name]
        if reasons[name]:
            continue
        try:
            activate_flash_3(name == "flash3")
            results = [compute(name, each, window) for each in inputs]
            if all(equal(*pair) for pair in zip(results, expected, strict=True)):
                found[name] = sum(seconds(name, each, window) for each in inputs)
            else:
                found[name] = "its result differs by more than rounding"
        except Exception as error:  # any kernel, any version of torch
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        finally:
            activate_flash_3(False)
    return found


def compute(name: str, inputs: Inputs, window: Window) -> list[Tensor]:
    """The output of a kernel, and the gradients of query, key and value."""
    *tensors, gradient = inputs.tensors
    out, _ = KERNELS[name](nn.Module(), *tensors, None, **inputs.boundaries, sliding_window=window)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two results of `compute` differ only by rounding: by less than two epsilons, as vectors.

    One key more or less in a window of 129 changes them by 10 %.
    """
    return all(
        float((one.float() - other.float()).norm() / other.float().norm())
        <= max(TOLERANCE, 2 * torch.finfo(other.dtype).eps)
        for one, other in zip(found, expected, strict=True)
    )


def seconds(name: str, inputs: Inputs, window: Window) -> float:
    """The time of a forward and backward pass: the least of some repeats."""
    device, times = inputs.tensors[0].device, list[float]()
    while len(times) <= REPEATS and (len(times) < 2 or sum(times) < ENOUGH):
        started = time.perf_counter()
        compute(name, inputs, window)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def fastest(found: Mapping[Window, Mapping[str, Outcome]], layers: Mapping[Window, int], usual: str) -> tuple[str, ...]:
    """The kernels with the least time over all layers: one name, or those of global and of local layers.

    `layers` has the number of layers by window. All layers with FlashAttention use the same version of it.
    """
    sums: dict[tuple[str, ...], float] = {}
    for without in ({"flash3"}, {"varlen", "cudnn"}):
        total, names = 0.0, dict[bool, str]()
        for window in sorted(found, key=lambda window: window is not None):  # global layers first
            usable = {
                name: each * (1 if name == usual else 1 + GAIN)
                for name, each in found[window].items()
                if not isinstance(each, str) and name not in without
            }
            least, name = min(((each, name) for name, each in usable.items()), default=(float("inf"), usual))
            names[window is None] = name
            total += layers[window] * least
        sums[tuple(dict.fromkeys(names.values()))] = total
    return min(sums, key=lambda names: sums[names])


def layer_name(window: Window) -> str:
    """What layers with this window are called on the launch card."""
    return "global layers" if window is None else "local layers"


def shown_times(found: Mapping[str, Outcome]) -> str:
    """`padded 1.25 ms, documents 1.90 ms`: the times of the kernels that can be used."""
    return ", ".join(f"{name} {each * 1e3:.2f} ms" for name, each in found.items() if not isinstance(each, str))
