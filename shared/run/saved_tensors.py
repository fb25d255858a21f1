"""The tensors of a checkpoint or an exported model, and how far two sets of them differ."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Tensors = Mapping[str, Callable[[], Any]]


def parts_of(folder: Path) -> dict[str, dict[str, Callable[[], Any]]]:
    """The tensors of a checkpoint or model, each read when it is called: {name of the file, without number: tensors}.

    A model may consist of several files, numbered as model-00001-of-00002.safetensors.
    """

    def read(file: Path, name: str) -> Any:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    parts: dict[str, dict[str, Callable[[], Any]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = parts.setdefault(re.sub(r"-\d+(-of-\d+)?$", "", file.stem), {})
        with safe_open(file, framework="pt") as opened:
            part.update({name: partial(read, file, name) for name in list(opened.keys())})
    for file in (*sorted(folder.glob("optimizer*.bin")), *sorted(folder.glob("custom_checkpoint_*.pkl"))):
        state = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        parts[file.stem] = {name: partial(lambda tensor: tensor, tensor) for name, tensor in named_tensors(state)}
    return parts


def named_tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a state dict, by their keys, joined by dots."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from named_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def difference_of(part: str, tensors_a: Tensors, tensors_b: Tensors) -> tuple[float, str]:
    """Compare two sets of tensors, with one tensor of each in memory at a time.

    Returns the norm of the difference divided by the norm of the values, all tensors as one vector, and a description
    with the tensor that differs most. The moments of an optimizer have different scales: each kind is a vector of its
    own, and the largest difference counts. The difference is infinite if names or shapes differ or a value is not
    finite.
    """
    if odd := tensors_a.keys() ^ tensors_b.keys():
        return math.inf, f"only one has {min(odd)}"
    squares: dict[str, list[float]] = {}  # of each vector: of the difference, of the values
    differing = {}  # name: relative difference, of the tensors that are not the same byte for byte
    for name in sorted(tensors_a):
        a, b = tensors_a[name](), tensors_b[name]()
        if a.shape != b.shape:
            return math.inf, f"{name} has shape {list(a.shape)} against {list(b.shape)}"
        same = a.dtype == b.dtype and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
        if not (a.is_floating_point() and b.is_floating_point()):
            if not same:  # rounding does not change a counter or an index, and its size would mask the weights
                return math.inf, f"{name} differs"
            continue
        norm = max(a.double().norm().item(), b.double().norm().item())
        vector = squares.setdefault(name.rpartition(".")[2] if part == "optimizer" else "", [0.0, 0.0])
        vector[1] += norm**2
        if not same:
            difference = (a.double() - b.double()).norm().item()
            vector[0] += difference**2
            differing[name] = difference / norm if norm else 0.0  # no norm: zeros that differ in sign or dtype
    if not differing:
        return 0.0, "byte for byte"
    ratios = [math.sqrt(difference / norm) if norm else 0.0 for difference, norm in squares.values()]
    if not all(map(math.isfinite, ratios)):
        return math.inf, "values that are not finite"
    worst = max(differing, key=lambda name: differing[name])
    return max(ratios), f"off by {max(ratios):.1e} ({differing[worst]:.1e} in {worst})"
