"""A Hub that cannot be reached is an early one-line error; local and cached models need no network."""

import socket
import threading

import pytest
from huggingface_hub import constants

from shared.errors import UserError
from shared.extras import hub


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
        with pytest.raises(UserError, match=r"no answer in 0\.05 s"):
            hub.require_hub("--dataset_name", "a/b")
    finally:
        released.set()


def test_the_proxy_is_checked_if_one_is_set(monkeypatch, stand_in, closed):
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", stand_in)
    hub.require_hub("--dataset_name", "a/b")
    monkeypatch.setenv("http_proxy", closed)
    with pytest.raises(UserError, match=r"no network to 127\.0\.0\.1"):
        hub.require_hub("--dataset_name", "a/b")
    monkeypatch.setattr(constants, "ENDPOINT", stand_in)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub.require_hub("--dataset_name", "a/b")


def test_offline_mode_is_respected_without_a_connection(monkeypatch, stand_in):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", stand_in)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        hub.require_hub("--dataset_name", "a/b")


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
    with pytest.raises(UserError, match="is not on this machine"):
        hub.require_model("someone/model", "another-branch")
    monkeypatch.setattr(constants, "ENDPOINT", stand_in)
    assert hub.require_model("someone/model") is False
