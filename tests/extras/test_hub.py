"""The Hub: unreachable, it is an early error of one line; local and cached models need none; uploads on request."""

import socket
import threading
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants
from runs import refusal

from shared.errors import UserError
from shared.extras import hub
from shared.extras.hub import Upload
from shared.options.data_options import ExtraOptions


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def stand_in():
    """The address of a server that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    """An address without a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_name_look_up_that_hangs_is_given_up(monkeypatch):
    released = threading.Event()

    def hang(*_args, **_kwargs):
        released.wait(30)
        return socket.socket()

    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(socket, "create_connection", hang)
    try:
        assert "no answer in 0.05 s" in refusal(hub.require_hub, "--dataset_name", "a/b")
    finally:
        released.set()


def test_nothing_is_checked_behind_a_proxy_and_offline_mode_is_respected(monkeypatch, stand_in, closed):
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", closed)
    hub.require_hub("--dataset_name", "a/b")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    assert "no network to 127.0.0.1" in refusal(hub.require_hub, "--dataset_name", "a/b")
    monkeypatch.setattr(constants, "ENDPOINT", stand_in)
    hub.require_hub("--dataset_name", "a/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(hub.require_hub, "--dataset_name", "a/b")


def test_a_local_model_needs_no_hub(monkeypatch, tmp_path, closed):
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    (tmp_path / "config.json").write_text("{}")
    assert hub.require_model(str(tmp_path)) is True
    with pytest.raises(UserError, match=r"^--revision v2 has no effect on a local folder .*remove"):
        hub.require_model(str(tmp_path), "v2")


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "~/gone", "out/nlp/model", __file__, "my model"])
def test_what_is_neither_a_model_nor_a_name_is_refused_without_the_hub(name):
    """tests/recipes/test_bad_input.py has a folder without a config."""
    with pytest.raises(UserError, match=r"neither a folder nor a valid name|has no config\.json"):
        hub.require_model(name)


def test_a_cached_model_is_loaded_from_local_files_only_without_a_network(monkeypatch, tmp_path, closed, stand_in):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for file, content in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):  # as the Hub's client leaves it
        cached = tmp_path / "models--someone--model" / file
        cached.parent.mkdir(parents=True)
        cached.write_text(content)
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    assert hub.require_model("someone/model") is True
    assert "is not on this machine" in refusal(hub.require_model, "someone/model", "another-branch")
    monkeypatch.setattr(constants, "ENDPOINT", stand_in)
    assert hub.require_model("someone/model") is False


class Hub:
    """Stands in for the Hub's client: records its requests, or fails."""

    asked: ClassVar[list] = []

    def create_repo(self, name, exist_ok):
        assert exist_ok
        if name == "refused":
            raise ConnectionError("401 Client Error.\n\nInvalid token")
        self.asked.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path, repo_id, commit_message):
        self.asked.append((sorted(path.name for path in folder_path.iterdir()), repo_id))
        return f"https://hub/{repo_id}"


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_something")
    monkeypatch.setattr(hub, "unreachable", lambda _: None)
    return Hub


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "run/model"
    folder.mkdir(parents=True)
    (folder / "weights").touch()
    return folder


def uploaded(model, **settings):
    """Begin and end a run on one process with these settings."""
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1, print=print)
    config, hook = ExtraOptions(output_dir=str(model.parent), **settings), Upload()
    hook.opened(SimpleNamespace(accelerator=accelerator, config=config))
    hook.exported(model)


@pytest.mark.parametrize(("given", "name"), [(None, "run"), ("mine", "mine")])
def test_the_model_is_uploaded_under_its_name(client, model, capsys, given, name):
    uploaded(model, push_to_hub=True, hub_model_id=given)
    assert client.asked == [name, (["weights"], f"me/{name}")]
    assert f"uploaded to https://hub/me/{name}" in capsys.readouterr().out


def test_a_failed_upload_keeps_the_model_and_its_error_tells_how_to_retry(client, model):
    with pytest.raises(UserError, match=f"^--push_to_hub: {model} could not be uploaded, start again to retry: 401 Cl"):
        uploaded(model, push_to_hub=True, hub_model_id="refused")
    assert (model / "weights").exists()
    with pytest.raises(UserError, match=r"^--push_to_hub needs another --hub_model_id: .*'my model'"):
        uploaded(model, push_to_hub=True, hub_model_id="my model")
