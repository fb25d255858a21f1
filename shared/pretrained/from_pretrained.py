"""Loading what `save_pretrained` wrote, from a folder or the Hub, with errors that a user can act on."""

import copy
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from shared.compat import of_transformers
from shared.errors import UserError, listed, say
from shared.pretrained.hub import require_model

ALIGNMENT = 64  # bytes, of every tensor that torch makes on a CPU


def load_pretrained(auto_class: str, name: str, revision: str | None = None, **kwargs: Any) -> Any:
    """`transformers.AUTO_CLASS.from_pretrained(name)`; models in float32, with a new head where the old does not fit.

    transformers takes the dtype of the file by default, and half-precision master weights lose small updates: mixed
    precision is for the forward and backward passes only.

    Raises:
        UserError: nothing there, no network, or not a model of this kind; names --model_name_or_path.
    """
    local_files_only = require_model(name, revision)
    import transformers

    if revision is not None:
        kwargs["revision"] = revision
    if auto_class.startswith("AutoModel"):
        kwargs |= {"dtype": torch.float32, "ignore_mismatched_sizes": True}
    try:
        loaded = getattr(transformers, auto_class).from_pretrained(name, local_files_only=local_files_only, **kwargs)
    except Exception as error:  # files and code of other people: whatever it raises, the choice of model is the cause
        given = f"{name} --revision {revision}" if revision else name
        raise UserError(
            f"--model_name_or_path {given} cannot be loaded by {auto_class} ({reason(error)}): give a model that fits "
            "the recipe, saved with its tokenizer or image processor"
        ) from None
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if isinstance(model, torch.nn.Module):
        align(model)
    return loaded


def label_order(name: str, names: tuple[str, ...], revision: str | None = None) -> tuple[str, ...]:
    """`names` in the order of the pretrained classifier's outputs, if those are the labels it knows; else as they are.

    Raises:
        UserError: there is no such model, or its config gives labels two numbers.
    """
    stored = stored_names(name, revision)
    return stored if sorted(stored) == sorted(names) else names


def stored_names(name: str, revision: str | None = None) -> tuple[str, ...]:
    """The labels that a model's config.json names, in the order of its outputs; without names LABEL_0, LABEL_1, ....

    Raises:
        UserError: there is no such model, or its config gives labels two numbers.
    """
    config = load_pretrained("AutoConfig", name, revision)
    by_number = {int(number): label for number, label in (config.id2label or {}).items()}
    by_label = {label: int(number) for label, number in (config.label2id or {}).items()}
    numbers = {label: number for number, label in by_number.items()}
    if set(by_label) == set(numbers) and by_label != numbers:
        raise UserError(
            f"--model_name_or_path {name}: id2label and label2id in its config.json give the labels different numbers: "
            "correct one of them"
        )
    return tuple(label for _, label in sorted(by_number.items()))


def are_placeholders(names: tuple[str, ...]) -> bool:
    """Whether these are the names that transformers gives to labels without names."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


def head_for(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """What a model's config says of a head for the labels `names`; some configs do not derive the number of labels."""
    label2id = {name: i for i, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": label2id, **more}


def load_classifier(
    auto_class: str, name: str, id2label: dict[int, str], revision: str | None = None, **head: Any
) -> Any:
    """A pretrained classifier for these labels, with the last layer that it has, or a new one for other labels.

    Labels that the model knows have to be in its order: see `label_order`.

    What the user would not expect is said: labels that only have numbers in the model, and a last layer that is new
    though the model has one. `knows_labels` of the model tells whether the layer is that of the file.

    Raises:
        UserError: as `load_pretrained` and `stored_names`.
    """
    stored, names = stored_names(name, revision), tuple(id2label.values())
    assert stored == names or sorted(stored) != sorted(names), f"{names} are not in the order of {stored}"
    model, found = load_pretrained(auto_class, name, revision, output_loading_info=True, id2label=id2label, **head)
    last = label_weights(model)
    missing = set(last) & set(found["missing_keys"])
    lost = set(last) & {key for key, *_ in found["mismatched_keys"]}
    other = len(names) > 1 and sorted(stored) != sorted(names)
    model.knows_labels = not (missing or lost or (other and not are_placeholders(stored)))
    given = f"--model_name_or_path {name}"
    if not missing and not model.knows_labels:
        if not lost:
            of_transformers.draw_anew(model, last)
        say(
            f"{given} tells {len(stored)} labels apart ({listed(stored)}), the data have {len(names)} "
            f"({listed(names)}): {' and '.join(last)} are new"
        )
    elif other and model.knows_labels:
        say(
            f"{given} has numbers for its labels, and no names: they are taken for {listed(names)}, in this order; if "
            "it is another, write id2label and label2id into its config.json"
        )
    return model


def label_weights(model: Any) -> list[str]:
    """The parameters whose shape depends on the number of labels: those of the last layer."""
    config = copy.deepcopy(model.config)
    config.num_labels = model.config.num_labels + 1
    with torch.device("meta"):
        wider = dict(type(model)(config).named_parameters())
    return [name for name, weights in model.named_parameters() if weights.shape != wider[name].shape]


def align(model: torch.nn.Module) -> None:
    """Move weights that begin anywhere in memory to where torch puts tensors, at a multiple of 64 bytes.

    They are read from files in place. MKL multiplies a matrix by a single row in another order of sums when the matrix
    does not begin at a multiple of 16 bytes, and then the run would depend on where its weights came to lie.
    """
    for weights in (*model.parameters(), *model.buffers()):
        if weights.data_ptr() % ALIGNMENT:
            weights.data = weights.data.clone()


def reason(error: Exception) -> str:
    """What transformers says, in one line that a user can read."""
    text = " ".join(str(error).split())
    if match := re.search(r"configuration class <class '[\w.]*?(\w+)Config'>", text):
        return f"a {match[1]} is no such model"
    if "tiktoken" in text and find_spec("sentencepiece") is None:  # what transformers tries next
        return "sentencepiece is not installed: pip install -r requirements.txt"
    if "instantiate the backend tokenizer" in text:
        return "there is no tokenizer that can be read"
    return text[:300] or type(error).__name__


def backbone(model: Any) -> torch.nn.Module:
    """The part below the head: the base model, or, where a classifier of transformers names none, its largest part."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if not isinstance(part, torch.nn.Linear)]  # CLIP's, SigLIP's
    return max(parts, key=lambda part: sum(p.numel() for p in part.parameters()))


def check_heads(hidden_size: int, num_attention_heads: int, rotary: bool = True) -> None:
    """Refuse sizes of a new encoder whose heads would be of no whole, or with rotary positions of no even, width.

    Raises:
        UserError: names both flags.
    """
    if hidden_size % (num_attention_heads * (2 if rotary else 1)):
        multiple = "twice --num_attention_heads" if rotary else "--num_attention_heads"
        raise UserError(
            f"--hidden_size {hidden_size} is not a multiple of {multiple} {num_attention_heads}"
            f"{', as rotary positions need' * rotary}: change one of them"
        )


def checkpoint_activations(model: Any) -> None:
    """What --gradient_checkpointing asks for, by the name that transformers 5.23 has for it, or that of 5.17.

    Raises:
        UserError: the model cannot do it.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f"--gradient_checkpointing: a {type(model).__name__} cannot do it: leave the flag out")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # non-reentrant, both
