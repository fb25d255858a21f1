"""Whether a server has a chance to answer, known within 5 s: without a network the Hub's client retries for 24-48 s."""

import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants

from shared.errors import UserError

CONNECT_SECONDS = 5.0


def require_hub(flag: str, value: str, instead: str | None = None) -> None:
    """Raises UserError unless the Hub (HF_ENDPOINT) takes one connection; `instead` is the way out to offer."""
    if reason := _unreachable():
        raise UserError(f"{flag} {value} is not on this machine and {reason}: {instead or f'leave out {flag}'}")


def require_upload() -> None:
    """Raises UserError unless --push_to_hub has a chance: a token, and a Hub that takes a connection."""
    later = "leave it out, and upload model/ when the run has ended"
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push_to_hub needs a token: set HF_TOKEN or run `hf auth login`, or {later}")
    if reason := _unreachable():
        raise UserError(f"--push_to_hub: {reason}: {later}")


def require_model(name: str, revision: str | None = None) -> bool:
    """Raises UserError unless the model `name` can be loaded; returns the local_files_only to pass to from_pretrained.

    A local folder and a cached model pass without a network; with one, a cached model may still fetch what is missing.
    """
    flag = "--model_name_or_path"
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"--revision {revision} has no effect on a local folder ({flag} {name}): leave it out")
        if not (folder / "config.json").is_file():
            raise UserError(f"{flag} {name} holds no config.json: give a folder that save_pretrained wrote")
        return True
    if folder.exists():
        raise UserError(f"{flag} {name} is a file: give the folder of the model, or its name on the Hub")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{flag} {name}: no such folder")
    try:
        cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
    except ValueError:
        raise UserError(f"{flag} {name!r} is neither a folder nor a valid name on the Hub (namespace/name)") from None
    if cached:
        return _unreachable() is not None
    require_hub(flag, name, f"give a local folder, or leave out {flag} to train a new encoder")
    return False


def _unreachable() -> str | None:
    """Why the Hub cannot be asked, or None."""
    return "HF_HUB_OFFLINE forbids to ask the Hub" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)


def unreachable(address: str) -> str | None:
    """Why the server of a URL cannot be asked, or None: one TCP connection, or to the proxy, and no byte sent."""
    endpoint = urlsplit(address)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    else:
        target = endpoint
    port = target.port or (443 if target.scheme == "https" else 80)
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((target.hostname, port), timeout=CONNECT_SECONDS).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    # In a thread, because a timeout of the socket does not bound the look-up of the name.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    failure = outcome[0] if outcome else f"no answer in {CONNECT_SECONDS:g} s"
    return f"there is no network to {target.hostname}:{port} ({failure})" if failure else None
