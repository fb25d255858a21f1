"""Models of transformers: what a run requires of them, and their export as from_pretrained reads it."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.config.fields import Meaning, fields_with
from shared.config.options import shown
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.run.export import Export


class Pretrained(Hook):
    """Makes a run export models of transformers with `save_pretrained`; says what the launch card must say of them."""

    def opened(self, run: Any) -> None:
        run.export = TransformersExport()

    def loaded(self, run: Any) -> None:
        """Name the format of activations, and sizes that have no effect."""
        if dtype := run.config.activation_dtype:
            run.card["precision"] = f"{dtype} activations without autocast, weights fp32"
        if without_effect := sizes_without_effect(run.config):
            run.card["note on sizes"] = f"no effect, because the pretrained model has its own sizes: {without_effect}"


def sizes_without_effect(config: Any) -> str:
    """The flags for sizes of a new model that have no effect, because the config names a pretrained model."""
    if config.model_name_or_path is None:
        return ""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name: getattr(config, name) for name in sorted(fields_with(type(config), Meaning.SIZE_OF_NEW_MODEL))}
    return ", ".join(f"--{name} {shown(value)}" for name, value in changed.items() if value != defaults[name])


class TransformersExport(Export):
    """Writes a model by its `save_pretrained`, and any other `nn.Module` as in the base class.

    A model with adapters (--lora_rank) has a function `merge_adapters`, which merges them into its weights. `adapter/`
    then has them unmerged, as PEFT reads them, with the head of a classifier.
    """

    def begin(self, model: Any) -> dict[str, Callable[[Path], object]]:
        """Merge the adapters of a model that has some."""
        return {"adapter": model.merge_adapters(model)} if hasattr(model, "merge_adapters") else {}

    def save(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        """Write weights and config, and check that they can be loaded; a state dict for other models."""
        if not hasattr(model, "save_pretrained"):
            super().save(model, weights, folder)
            return
        with without_reports():
            model.save_pretrained(folder, state_dict=weights)
        check_loads(model, folder)


@contextmanager
def without_reports() -> Iterator[None]:
    """Keep transformers from printing progress bars, and tables of the weights that it loads."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def loading_info(model_class: Any, folder: Path | None, **source: Any) -> dict[str, Any]:
    """The keys of weights that `from_pretrained` would not load, as `KIND_keys`; it takes no memory for the weights."""
    how: Any = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with without_reports():
        return model_class.from_pretrained(folder, local_files_only=True, **how, **source)[1]


def check_loads(model: torch.nn.Module, folder: Path | None = None) -> None:
    """Check that `from_pretrained` loads all weights of a model: from its state dict, or as exported to `folder`.

    It takes 0.1 s for BERT base. Only transformers knows which names it writes, which it omits because they are tied,
    and which it reads. A model that is not a `PreTrainedModel` is not checked.

    Raises:
        UserError: a weight is missing, has another shape, or is not one of the model's class; the message names it.
    """
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return
    # fully_shard puts a class of its own before the model's class in the order of bases.
    own: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    source = {} if folder else {"config": copy.deepcopy(model.config), "state_dict": model.state_dict()}
    found = loading_info(own, folder, **source)
    wrong = {kind: sorted(map(str, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        counts = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in wrong.items() if names)
        raise UserError(
            f"from_pretrained would not load this {own.__name__} with the weights that are trained ({counts}): "
            "build_model must return the model as transformers makes it, or a torch.nn.Module of your own that "
            f"contains it{'; model/ was not written, and the checkpoints are kept' if folder else ''}"
        )
