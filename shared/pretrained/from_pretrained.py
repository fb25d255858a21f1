"""Loading pretrained models from a folder or the Hub, with messages that name the fix."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shared.errors import UserError, about, listed, say
from shared.extras.hub import FLAG, require_model
from shared.models.trainable import backbone, layers_by_depth
from shared.models.transformers_models import without_reports

ALIGNMENT = 64  # bytes: the alignment of tensors that torch allocates on a CPU
# model_type of the classifiers of transformers with a choice of pooling: their name for "cls"; "mean" is "mean" in all.
POOLINGS = {"modernbert": "cls", "eurobert": "bos", "ultrabert": "cls"}


def load_pretrained(auto_class: str, name: str, revision: str | None = None, flag: str = FLAG, **kwargs: Any) -> Any:
    """`transformers.AUTO_CLASS.from_pretrained(name)`; models in float32, with a new head if the stored one differs.

    By default, transformers uses the dtype of the file. Half-precision master weights would lose small updates: mixed
    precision applies to the forward and backward passes only. `flag` is the one that gives the name, for the errors.

    Raises:
        UserError: the model does not exist, cannot be downloaded, or is not of this kind; or see `require_weights`.
    """
    local_files_only = require_model(name, revision, flag)
    import transformers

    if revision is not None:
        kwargs["revision"] = revision
    with_info, is_model = kwargs.pop("output_loading_info", False), auto_class.startswith("AutoModel")
    if is_model:
        kwargs |= {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    given = f"{flag} {name} --revision {revision}" if revision else f"{flag} {name}"
    with about(f"{given} cannot be loaded by {auto_class}"):
        loaded = getattr(transformers, auto_class).from_pretrained(name, local_files_only=local_files_only, **kwargs)
    if not is_model:
        return loaded
    model, found = loaded
    require_weights(model, found, given)
    align(model)
    return (model, found) if with_info else model


def require_weights(model: Any, found: dict[str, Any], given: str) -> None:
    """Check that the files of a model have the weights of its layers, in the shapes of its config. A head may be new.

    Raises:
        UserError: the weights have other names or another shape, so that transformers has drawn random ones.
    """
    inside = "" if model.base_model is model else f"{model.base_model_prefix}."
    differing = sorted(each for each in found["mismatched_keys"] if each[0].startswith(inside))
    last = label_weights(model) if differing else []
    for key, stored, needed in differing:
        if key not in last:
            raise UserError(
                f"{given}: {key} is {tuple(stored)} in its files, and {tuple(needed)} by its config.json: correct that"
            )
    parameters, missing = dict(model.named_parameters()), {*found["missing_keys"]}
    needed_by = layers_by_depth(backbone(model)) if parameters.keys() - missing else [[model]]
    of_layers = {id(parameter) for parts in needed_by for part in parts for parameter in part.parameters()}
    if lacking := [key for key, parameter in parameters.items() if key in missing and id(parameter) in of_layers]:
        others = listed(sorted(found["unexpected_keys"]), 2) or "nothing else"
        raise UserError(
            f"{given}: its files lack {listed(lacking, 2)}, and have {others}: rename these, or correct its config.json"
        )


def label_order(name: str, names: tuple[str, ...], revision: str | None = None) -> tuple[str, ...]:
    """`names` in the order of the pretrained classifier's outputs if it has the same labels; otherwise unchanged.

    Raises:
        UserError: see `stored_names`.
    """
    stored = stored_names(name, revision)
    return stored if sorted(stored) == sorted(names) else names


def stored_names(name: str, revision: str | None = None) -> tuple[str, ...]:
    """The label names in a model's config.json, in the order of its outputs; LABEL_0, LABEL_1, ... if it has none.

    Raises:
        UserError: the config cannot be loaded.
    """
    config = load_pretrained("AutoConfig", name, revision)
    by_number = {int(number): label for number, label in (config.id2label or {}).items()}
    return tuple(by_number[number] for number in sorted(by_number))


def are_placeholders(names: tuple[str, ...]) -> bool:
    """Whether these are the default names LABEL_0, LABEL_1, ... of transformers."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


def head_for(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """The config entries of a head for the labels `names`. Includes num_labels, which some configs do not derive."""
    label2id = {name: i for i, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": label2id, **more}


def pooling_of_head(config: Any) -> dict[str, str]:
    """The config entry for --pooling of a classifier; {} for `auto`.

    Only a pooling that the model's own config can name is possible: transformers reads it there when it loads the
    exported model. Both poolings ignore padding.

    Raises:
        UserError: classifiers of this type have no choice of pooling in transformers; or see `load_pretrained`.
    """
    if config.pooling == "auto":
        return {}
    name = config.model_name_or_path
    kind = load_pretrained("AutoConfig", name, config.revision).model_type if name else config.model_type
    if kind not in POOLINGS:
        flag = f"--model_name_or_path {name}, a {kind}," if name else f"--model_type {kind}"
        raise UserError(
            f"--pooling {config.pooling}: {flag} has a classifier without a choice of pooling in transformers: leave "
            f"the flag out, or use a {' or '.join(POOLINGS)}"
        )
    return {"classifier_pooling": POOLINGS[kind] if config.pooling == "cls" else config.pooling}


def load_classifier(
    auto_class: str, name: str, id2label: dict[int, str], revision: str | None = None, **head: Any
) -> Any:
    """A pretrained classifier with its stored last layer, or with a new last layer if its labels differ from these.

    If the model has the same labels, they must be in its order: see `label_order`. The attribute `knows_labels` of the
    model is True if the last layer comes from the file. A message is printed in two cases: the stored labels have no
    names, or a stored last layer is replaced by a new one.

    Raises:
        UserError: see `load_pretrained` and `stored_names`.
    """
    stored, names = stored_names(name, revision), tuple(id2label.values())
    assert stored == names or sorted(stored) != sorted(names), f"{names} are not in the order of {stored}"
    model, found = load_pretrained(auto_class, name, revision, output_loading_info=True, id2label=id2label, **head)
    last = label_weights(model)
    missing = set(last) & set(found["missing_keys"])
    lost = set(last) & {key for key, *_ in found["mismatched_keys"]}
    other = len(names) > 1 and sorted(stored) != sorted(names)
    knows_labels = not (missing or lost or (other and not are_placeholders(stored)))
    given = f"--model_name_or_path {name}"
    if not missing and not knows_labels:
        if not lost:  # transformers draws the weights that a state dict lacks
            kept = {key: value for key, value in model.state_dict().items() if key not in last}
            with without_reports():
                model = type(model).from_pretrained(None, config=model.config, state_dict=kept, dtype=torch.float32)
        say(
            f"{given} has a head for {len(stored)} labels ({listed(stored)}), but the data have {len(names)} "
            f"({listed(names)}): {' and '.join(last)} are new"
        )
    elif other and knows_labels:
        say(
            f"{given} has numbers for its labels, and no names: they are read as {listed(names)}, in this order; if "
            "the order is wrong, write id2label and label2id into its config.json"
        )
    model.knows_labels = knows_labels
    return model


def label_weights(model: Any) -> list[str]:
    """The names of the parameters whose shape depends on the number of labels: those of the last layer.

    Adapters give other names to the parameters of the layers below (see shared/encoders/text_models.py).
    """
    config = copy.deepcopy(model.config)
    config.num_labels = model.config.num_labels + 1
    with torch.device("meta"):
        wider = dict(type(model)(config).named_parameters())
    parameters = model.named_parameters()
    return [name for name, weights in parameters if name in wider and weights.shape != wider[name].shape]


def align(model: torch.nn.Module) -> None:
    """Copy weights whose address is not a multiple of 64 bytes to new memory, which torch aligns.

    Weights that are mapped from a file may have any address. If a matrix is not aligned to 16 bytes, MKL multiplies it
    by a single row in a different order of sums, so the result of the run would depend on the addresses.
    """
    for weights in (*model.parameters(), *model.buffers()):
        if weights.data_ptr() % ALIGNMENT:
            weights.data = weights.data.clone()


def checkpoint_activations(model: Any) -> None:
    """Enable --gradient_checkpointing, with the method of transformers 5.23 or that of 5.17.

    Raises:
        UserError: the model does not support it.
    """
    # Both methods use non-reentrant checkpointing.
    with about("--gradient_checkpointing"):
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
