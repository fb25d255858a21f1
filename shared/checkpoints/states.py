"""What a checkpoint holds of a run: tensors by file and name, and all else as plain values for state.json; and back.

model.safetensors         parameters and buffers, under their names in the model; tied ones once
optimizer.safetensors     PARAMETER/KEY, such as "classifier.weight/exp_avg", of all optimizers
registered_0.safetensors  a module that was registered for checkpoints: the averaged weights
"""

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import TensorSpec
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.errors import listed
from shared.optimization.optimizers import inner

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
GROUP = "optimizer_0.group_{}"  # its name among those of parameters
Tensors = dict[str, Tensor]
Values = dict[str, Any]
"""Text, numbers, booleans, None, and lists and dicts of these, as JSON keeps them."""


def modules_by_file(model: nn.Module, registered: Sequence[nn.Module] = ()) -> dict[str, nn.Module]:
    """The modules of a checkpoint, by file: model.safetensors, registered_0.safetensors."""
    return {MODEL: model} | {f"registered_{i}.safetensors": module for i, module in enumerate(registered)}


def optimizer_state(model: nn.Module, optimizer: Any) -> tuple[Tensors, Values]:
    """The tensors of an optimizer, by name, and its groups and plain values, by parameter name."""
    tensors: Tensors = {}

    def plain(name: str, values: Values) -> Values:
        """The values that are no tensors; the tensors are kept as NAME/KEY."""
        tensors.update({f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)})
        return {key: value for key, value in values.items() if not isinstance(value, Tensor)}

    names, found = names_by_group(model, optimizer), inner(optimizer).state_dict()
    flat = [*chain(*names)]
    state = {flat[index]: plain(flat[index], values) for index, values in found["state"].items()}
    groups = [plain(GROUP.format(i), group) | {"params": names[i]} for i, group in enumerate(found["param_groups"])]
    return tensors, {"groups": groups, "state": {name: values for name, values in state.items() if values}}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def names_by_group(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """The names of the parameters of each group; `require_all` has checked that they are the model's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in inner(optimizer).param_groups]


def optimizer_state_dict(path: Path) -> Values:
    """The state dict of the optimizer in a checkpoint, as torch numbers its parameters, on the CPU."""
    by_name: dict[str, Tensors] = {}
    for place, tensor in load_file(path / OPTIMIZER).items():
        name, _, key = place.rpartition("/")
        by_name.setdefault(name, {})[key] = tensor
    (described,) = json.loads((path / "state.json").read_text())["optimizers"]
    groups: list[Values] = []
    names: list[str] = []
    for i, group in enumerate(described["groups"]):
        values = {key: as_tuples(value) for key, value in group.items()} | by_name.get(GROUP.format(i), {})
        groups.append(values | {"params": [len(names) + n for n, _ in enumerate(group["params"])]})
        names += group["params"]
    state = [described["state"].get(name, {}) | by_name.get(name, {}) for name in names]
    return {"state": {index: values for index, values in enumerate(state) if values}, "param_groups": groups}


def as_tuples(value: Any) -> Any:
    """A setting of a group as it was before JSON made a list of each tuple, also of those inside."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def load_optimizer(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Load what `optimizer_state` saved.

    Raises:
        ValueError, RuntimeError: it belongs to another optimizer.
        OSError, SafetensorError: a file cannot be read.
    """
    stored = json.loads((path / "state.json").read_text())["optimizers"]
    if [[group["params"] for group in each["groups"]] for each in stored] != [names_by_group(model, optimizer)]:
        raise ValueError("its optimizer has other parameters")
    state = optimizer_state_dict(path)
    parameters = [parameter for group in inner(optimizer).param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        values |= {key: laid_out(each, parameters[index]) for key, each in values.items() if isinstance(each, Tensor)}
    inner(optimizer).load_state_dict(state)
    for index, values in state["state"].items():
        found = inner(optimizer).state[parameters[index]]
        for key, value in values.items():  # torch gives them the dtype of the parameter
            if isinstance(value, Tensor) and key in found and found[key].dtype != value.dtype:
                found[key] = value.to(found[key].device)


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of an optimizer's value with the memory layout of its parameter, which fused kernels rely on.

    The value itself is mapped from a file, and torch would keep it as the optimizer's state.
    """
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype).copy_(value)


def load_model(model: nn.Module, file: Path, may_lack: Collection[str] = ()) -> None:
    """Load a model from its file, which may lack some parameters, and has tied tensors, which share memory, only once.

    Raises:
        RuntimeError: the file lacks other parameters of the model, has others, or has other shapes.
    """
    own, stored = model.state_dict(), load_file(file)
    _, unexpected = model.load_state_dict(stored, strict=False)
    loaded = {storage_of(name, own[name]) for name in stored if name in own}
    missing = {name for name, tensor in own.items() if storage_of(name, tensor) not in loaded}
    if wrong := sorted((missing - {*may_lack}) | {*unexpected}):
        raise RuntimeError(f"it differs in {listed(wrong)}")


def pieces_of(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The content of a file of safetensors, in pieces. Tensors are not copied if they are contiguous on the CPU."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each tensor is aligned
    header: Values = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
        header[name] = {"dtype": spec.dtype, "shape": [*tensor.shape], "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    yield len(content).to_bytes(8, "little") + content
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield flat.numpy().data


def distinct(state: Tensors) -> Tensors:
    """A state dict with one name for each group of tied tensors, because safetensors stores them once."""
    found: dict[Any, str] = {}
    for name, tensor in state.items():
        found.setdefault(storage_of(name, tensor), name)
    return {name: state[name] for name in found.values()}


def storage_of(name: str, tensor: Tensor) -> Any:
    """What tied tensors of a state dict have in common, and all others do not."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.nbytes else name
