"""Loading what `save_pretrained` wrote, from a folder or the Hub, with errors that a user can act on."""

import re
from importlib.util import find_spec
from typing import Any

import torch

from shared.errors import UserError
from shared.hub import require_model

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
    if isinstance(loaded, torch.nn.Module):
        align(loaded)
    return loaded


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
