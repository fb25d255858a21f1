"""The tensors of a checkpoint or an exported model, and how far two sets of them differ."""

import math
import re
from collections.abc import Callable, Mapping
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
    return parts


def difference_of(tensors_a: Tensors, tensors_b: Tensors) -> tuple[float, str]:
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
        vector = squares.setdefault(name.partition("/")[2], [0.0, 0.0])  # the moment, in a file of an optimizer
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
