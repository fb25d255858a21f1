"""The Hub: checking within 5 s whether it can be reached, the card of a model, and `--push_to_hub`.

Without a network, the Hub's client retries for 24-48 s.
"""

import dataclasses
import shlex
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id
from torch import nn

from shared.config.fields import Meaning, fields_with
from shared.config.options import shown
from shared.errors import UserError, about, count_of
from shared.monitoring.hooks import Hook
from shared.processes.collectives import on_main_process
from shared.run.export import WEIGHTS, results_of

CARD = "README.md"  # the file name of a model card
CONNECT_SECONDS = 5.0
FLAG = "--model_name_or_path"


def require_hub(flag: str, value: str, instead: str | None = None) -> None:
    """Raise UserError if the Hub (HF_ENDPOINT) does not accept a connection; `instead` is the fix in the message."""
    if reason := _unreachable():
        raise UserError(f"{flag} {value} is not on this machine and {reason}: {instead or f'remove {flag}'}")


def require_upload(name: str) -> None:
    """Raise UserError if --push_to_hub cannot work.

    `name` is no name of a repository, there is no token, or the Hub does not accept a connection.
    """
    later = "remove the flag, and upload model/ after the run"
    with about("--push_to_hub needs another --hub_model_id"):
        validate_repo_id(name)
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push_to_hub requires a token: set HF_TOKEN or run `hf auth login`, or {later}")
    if reason := _unreachable():
        raise UserError(f"--push_to_hub: {reason}: {later}")


def require_model(name: str, revision: str | None = None, flag: str = FLAG) -> bool:
    """The value of `local_files_only` with which from_pretrained can load the model `name`.

    Local folders and cached models need no network. If the Hub can be reached, missing files of a cached model are
    downloaded. `flag` is the one that gives the name, for the errors.

    Raises:
        UserError: the model cannot be loaded.
    """
    folder = Path(name)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not (folder / "config.json").is_file():
            raise UserError(f"{flag} {name} has no config.json: use a folder that save_pretrained wrote")
        if revision is not None:
            raise UserError(f"--revision {revision} has no effect on a local folder ({flag} {name}): remove it")
        return True
    with about(f"{flag} {name!r} is neither a folder nor a valid name on the Hub"):
        cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
    if cached:
        return _unreachable() is not None
    require_hub(flag, name, f"use a local folder, or remove {flag} to train a new encoder")
    return False


def _unreachable() -> str | None:
    """Why the Hub cannot be reached, or None."""
    return "HF_HUB_OFFLINE forbids using the Hub" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)


def unreachable(address: str) -> str | None:
    """Why the server of a URL cannot be reached, or None. Opens one TCP connection to it, unless a proxy is set."""
    target = urlsplit(address)
    if {*urllib.request.getproxies()} - {"no"} and not urllib.request.proxy_bypass(target.hostname or ""):
        return None
    port = target.port or (443 if target.scheme == "https" else 80)
    outcome = [f"no answer in {CONNECT_SECONDS:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((target.hostname, port), timeout=CONNECT_SECONDS).close()
            outcome[0] = ""
        except OSError as error:
            outcome[0] = error.strerror or str(error)

    # In a thread, because a socket's timeout does not limit the time of the DNS lookup.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    return f"there is no network to {target.hostname}:{port} ({outcome[0]})" if outcome[0] else None


class ModelCard(Hook):
    """Adds README.md to model/, the card of the model: its training, its metrics, and the command that trained it."""

    def saved(self, run: Any, model: nn.Module, folder: Path) -> None:
        (folder / CARD).write_text(card(run, model, folder))


def card(run: Any, model: nn.Module, folder: Path) -> str:
    """The card of an unwrapped model of a run in `folder`, with the notes of the run as paragraphs."""
    config, (step, results) = run.config, results_of(run.config, run.progress)
    names_of_data = fields_with(type(config), Meaning.NAMES_DATA) - {"corpus_file"}  # nothing is trained on it
    named = [getattr(config, field.name) for field in dataclasses.fields(config) if field.name in names_of_data]
    data = next((shown(value) for value in named if value), "the embedded data")
    base, how_to_load = getattr(config, "model_name_or_path", None), []
    is_base = base and not Path(base).exists() and not getattr(config, "from_scratch", False)
    library = "sentence-transformers" if (folder / "modules.json").is_file() else "transformers"
    if not hasattr(model, "save_pretrained"):
        library = ""
        how_to_load = [
            f"`{WEIGHTS}` holds the state dict of a {type(model).__name__}, which `build_model` of the recipe builds:",
            f'    from safetensors.torch import load_model\n    load_model(model, "{WEIGHTS}")',
        ]
    header = {"library_name": library, "base_model": base if is_base else "", "tags": "[accelerate-recipes]"}
    values = [f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in results.items()]
    paragraphs = [
        "\n".join(["---", *(f"{name}: {value}" for name, value in header.items() if value), "---"]),
        f"# {config.run_name or Path(config.output_dir).resolve().name}",
        f"Trained with accelerate-recipes on {data}: {count_of(step, 'step')} of {config.global_batch_size} "
        f"samples, seed {config.seed}.",
        *run.notes,
        "\n".join(["| metric on the validation data | value |", "|---|---|", *values]),
        *how_to_load,
        "Command:",
        f"    {shlex.join(sys.argv)}",
    ]
    return "\n\n".join(paragraphs) + "\n"


class Upload(Hook):
    """Uploads `model/`, for --push_to_hub."""

    def opened(self, run: Any) -> None:
        """Refuse a run whose model could not be uploaded."""
        self.accelerator = run.accelerator
        self.name = run.config.hub_model_id or Path(run.config.output_dir).resolve().name
        on_main_process(self.accelerator, lambda: require_upload(self.name))

    def exported(self, folder: Path) -> None:
        address = on_main_process(self.accelerator, lambda: push(folder, self.name))
        self.accelerator.print(f"uploaded to {address}")


def push(model_folder: Path, name: str) -> str:
    """Upload `model/` to the Hub as `name`; return its address.

    Raises:
        UserError: the upload failed; the local model is kept.
    """
    with about(f"--push_to_hub: {model_folder} could not be uploaded, start again to retry"):
        api = huggingface_hub.HfApi()
        name = api.create_repo(name, exist_ok=True).repo_id
        commit = "Train with accelerate-recipes"
        return str(api.upload_folder(folder_path=model_folder, repo_id=name, commit_message=commit))
