"""What a checkpoint holds of a run: tensors by file and name, and all else as plain values for state.json; and back.

model.safetensors         parameters and buffers, under their names in the model; tied ones once
optimizer.safetensors     PARAMETER/KEY, such as "classifier.weight/exp_avg", of all optimizers
registered_0.safetensors  an object that was registered for checkpoints, such as the averaged weights
"""

import copy
import io
import json
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from shared.checkpoints import digests
from shared.errors import UserError, listed
from shared.optimization.optimizers import inner

MODEL, OPTIMIZER, REGISTERED = "model.safetensors", "optimizer.safetensors", "registered_{}.safetensors"
Tensors = dict[str, Tensor]
Values = dict[str, Any]
"""Text, numbers, booleans, None, and lists and dicts of these, as JSON keeps them."""


def numbered(index: int) -> str:
    """The file of a model: model.safetensors, model_1.safetensors."""
    return f"model_{index}.safetensors" if index else MODEL


def state_of(
    models: list[nn.Module], optimizers: list[Any], registered: list[Any], frozen: Collection[str] = ()
) -> tuple[dict[str, Tensors], Values]:
    """The state of a run's objects: its tensors, by file and name, and its plain values.

    Args:
        models: unwrapped or wrapped; their names are those of `state_dict`.
        optimizers: of parameters of these models; a parameter has one optimizer.
        registered: objects with a `state_dict` of tensors, plain values and dicts of these.
        frozen: names of parameters to leave out.

    Raises:
        UserError: a state dict holds something else.
    """
    files = {}
    for i, model in enumerate(models):
        files[numbered(i)] = distinct({n: tensor for n, tensor in model.state_dict().items() if n not in frozen})
    files[OPTIMIZER], of_optimizers = optimizer_state(models, optimizers)
    of_registered = []
    for i, each in enumerate(registered):
        tensors: Tensors = {}
        of_registered.append(separate(each.state_dict(), tensors))
        files[REGISTERED.format(i)] = distinct(tensors)
    return files, {"optimizers": of_optimizers, "registered": of_registered}


def optimizer_state(models: list[nn.Module], optimizers: list[Any]) -> tuple[Tensors, list[Values]]:
    """The tensors of all optimizers, by name, and for each one its groups and plain values, by parameter name."""
    tensors: Tensors = {}
    described: list[Values] = []
    for names, optimizer in zip(names_by_group(models, optimizers), optimizers, strict=True):
        state = inner(optimizer).state_dict()
        flat = [name for of_group in names for name in of_group]
        by_name = {flat[index]: values for index, values in state["state"].items()}
        assert len({*flat}) == len(flat)
        groups = [
            separate({key: value for key, value in group.items() if key != "params"}, tensors, f"{of_group}/")
            for of_group, group in zip(group_names(len(described), names), state["param_groups"], strict=True)
        ]
        groups = [group | {"params": of_group} for group, of_group in zip(groups, names, strict=True)]
        described.append({"groups": groups, "state": separate(by_name, tensors)})
    return tensors, described


def group_names(optimizer: int, groups: Iterable[Any]) -> list[str]:
    """The names of an optimizer's groups among those of parameters."""
    return [f"optimizer_{optimizer}.group_{i}" for i, _ in enumerate(groups)]


def names_by_group(models: list[nn.Module], optimizers: list[Any]) -> list[list[list[str]]]:
    """The names of the parameters of each group of each optimizer, unique over all models.

    A parameter that belongs to no model has a name made of its group and its place there.
    """
    names: dict[Tensor, str] = {}
    for i, model in enumerate(models):
        names |= {p: f"model_{i}.{name}" if i else name for name, p in model.named_parameters()}
    return [
        [
            [names.get(parameter, f"{name}.parameter_{n}") for n, parameter in enumerate(group["params"])]
            for name, group in zip(group_names(i, groups), groups, strict=True)
        ]
        for i, groups in enumerate(inner(optimizer).param_groups for optimizer in optimizers)
    ]


def separate(state: Values, tensors: Tensors, path: str = "") -> Values:
    """The plain values of a state dict; its tensors are added to `tensors` under their paths, joined by "/".

    Raises:
        UserError: it holds something that JSON does not keep.
    """
    plain: Values = {}
    for key, value in state.items():
        place = f"{path}{key}"
        if not isinstance(key, str) or "/" in key:
            raise UserError(f"the state dict of an object in a checkpoint has the key {place!r}: use names without /")
        if isinstance(value, Tensor):
            assert place not in tensors, place
            tensors[place] = value
        elif isinstance(value, dict):
            if (inside := separate(value, tensors, f"{place}/")) or not value:
                plain[key] = inside
        elif is_plain(value):
            plain[key] = value
        else:
            raise UserError(
                f"{place} in the state dict of an object in a checkpoint is a {type(value).__name__}: use tensors, "
                "numbers, text, and lists or dicts of these"
            )
    return plain


def is_plain(value: Any) -> bool:
    """Whether JSON keeps a value; a tuple becomes a list."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def joined(plain: Values, tensors: Tensors) -> Values:
    """The state dict that `separate` took apart."""
    state = copy.deepcopy(plain)
    for path, tensor in tensors.items():
        *parents, key = path.split("/")
        here = state
        for parent in parents:
            here = here.setdefault(parent, {})
        here[key] = tensor
    return state


def optimizer_state_dicts(described: list[Values], tensors: Tensors) -> list[Values]:
    """The state dicts of optimizers as torch numbers their parameters, from what `optimizer_state` returned."""
    by_name: dict[str, Tensors] = {}
    for path, tensor in tensors.items():
        name, _, rest = path.partition("/")
        by_name.setdefault(name, {})[rest] = tensor
    found = []
    for i, each in enumerate(described):
        names = [name for group in each["groups"] for name in group["params"]]
        state: dict[int, Values] = {}
        groups: list[Values] = []
        for index, name in enumerate(names):
            if name in by_name or name in each["state"]:
                state[index] = joined(each["state"].get(name, {}), by_name.get(name, {}))
        for of_group, group in zip(group_names(i, each["groups"]), each["groups"], strict=True):
            first = sum(len(before["params"]) for before in groups)
            values = {key: as_tuples(value) for key, value in group.items()}
            values["params"] = [*range(first, first + len(group["params"]))]
            groups.append(values | by_name.get(of_group, {}))
        found.append({"state": state, "param_groups": groups})
    return found


def as_tuples(value: Any) -> Any:
    """A setting of a group as it was before JSON made a list of each tuple, also of those inside."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def state_dicts(path: Path) -> Values:
    """The state dicts in a checkpoint, on the CPU, to read it without a run; see docs/checkpoints.md.

    Returns:
        `models`: of each model, without its frozen pretrained parameters and with one name for tied ones.
        `optimizers`: of each optimizer, as torch numbers parameters. `registered`: of each registered object.
        `names`: for each optimizer and group, the names of its parameters. `scaler`: of the loss scale, or None.
    """
    state = json.loads((path / "state.json").read_text())
    described = state["optimizers"]
    models = sorted(path.glob("model*.safetensors"), key=lambda file: (len(file.name), file.name))
    return {
        "models": [load_file(file) for file in models],
        "optimizers": optimizer_state_dicts(described, load_file(path / OPTIMIZER)),
        "registered": [
            joined(plain, load_file(path / REGISTERED.format(i))) for i, plain in enumerate(state["registered"])
        ],
        "names": [[group["params"] for group in each["groups"]] for each in described],
        "scaler": state["scaler"],
    }


def load_state(path: Path, models: list[nn.Module], optimizers: list[Any], registered: list[Any]) -> None:
    """Load what `state_of` saved, except the models.

    Raises:
        ValueError, RuntimeError: it belongs to other objects.
        OSError, SafetensorError: a file cannot be read.
    """
    found = state_dicts(path)
    if found["names"] != names_by_group(models, optimizers):
        raise ValueError("its optimizers have other parameters")
    for optimizer, state in zip(optimizers, found["optimizers"], strict=True):
        parameters = [parameter for group in inner(optimizer).param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            values |= {key: laid_out(value, parameters[index]) for key, value in tensors.items()}
        inner(optimizer).load_state_dict(state)
    for each, state in zip(registered, found["registered"], strict=True):
        stored: Tensors = {}
        own: Tensors = {}
        plain = separate(state, stored)
        separate(each.state_dict(), own)
        each.load_state_dict(joined(plain, with_tied(stored, own)))


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of an optimizer's value with the memory layout of its parameter, which fused kernels rely on.

    The value itself is mapped from a file, and torch would keep it as the optimizer's state.
    """
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype).copy_(value)


def with_tied(stored: Tensors, own: Tensors) -> Tensors:
    """Tensors of a file under all names that tied ones have in `own`."""
    written = {identity(name, own[name]): name for name in stored if name in own}
    return stored | {
        name: stored[written[key]] for name, tensor in own.items() if (key := identity(name, tensor)) in written
    }


def load_model(model: nn.Module, file: Path, may_lack: Collection[str] = ()) -> None:
    """Load a model from its file, which may lack some parameters.

    Raises:
        RuntimeError: the file lacks other parameters of the model, has others, or has other shapes.
    """
    stored = with_tied(load_file(file), model.state_dict())
    missing, unexpected = model.load_state_dict(stored, strict=False)
    if wrong := sorted(({*missing} - {*may_lack}) | {*unexpected}):
        raise RuntimeError(f"it differs in {listed(wrong)}")


def pieces_of(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The content of a file of safetensors, in pieces. Tensors are not copied if they are contiguous on the CPU."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each tensor is aligned
    header: Values = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        entry = {"dtype": name_of(tensors[name].dtype), "shape": [*tensors[name].shape], "data_offsets": [start, end]}
        header[name] = entry
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    yield len(content).to_bytes(8, "little") + content
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield flat.numpy().data


@cache
def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in files of safetensors."""
    file = io.BytesIO(safetensors_bytes({"": torch.empty(0, dtype=dtype)}))
    return json.loads(file.read(int.from_bytes(file.read(8), "little")))[""]["dtype"]


def distinct(state: Tensors) -> Tensors:
    """A state dict with one name for each group of tied tensors, because safetensors stores them once."""
    found: dict[Any, str] = {}
    for name, tensor in state.items():
        found.setdefault(identity(name, tensor), name)
    return {name: state[name] for name in found.values()}


def identity(name: str, tensor: Tensor) -> Any:
    """What tied tensors of a state dict have in common, and all others do not."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.nbytes else name


def frozen_parameters(model: nn.Module) -> Tensors:
    """The parameters that are not trained, under all of their names."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def digest_of(tensors: Iterable[Tensor], algorithm: str = digests.ALGORITHM) -> str:
    """A digest of shapes, dtypes and values, by one of `digests.ALGORITHMS`."""
    found = digests.ALGORITHMS[algorithm]()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
