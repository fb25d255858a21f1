"""Reading from a URL: errors that pass are retried, and errors that stay are one line."""

from types import SimpleNamespace

import fsspec
import pytest
import runs
from range_server import RangeServer

from shared.errors import UserError
from shared.remote import object_store
from shared.remote.object_store import RemoteFolder

CONTENT = bytes(range(256))
CHECK = "check the URL, the credentials and the network"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    return tmp_path


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(object_store, "_told", -object_store.PATIENCE)


def refusal(url, *args, **kwargs):
    return runs.refusal(RemoteFolder(url, "--prepared_data").read, *args, **kwargs)


def test_ranges_and_whole_files_are_read_over_http_and_from_a_folder(folder):
    with RangeServer(folder) as server:
        for url in (server.url, f"{server.url}/", f"file://{folder}"):
            remote = RemoteFolder(url, "--prepared_data")
            assert remote.read("a") == CONTENT
            assert remote.read("a", range(10, 20)) == CONTENT[10:20]
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/here/a", CONTENT)
    assert RemoteFolder("memory://here", "--prepared_data").read("a", range(250, 256)) == CONTENT[250:]


@pytest.mark.parametrize("url", ["https://me:secret@host:8/a?b", "s3://me:secret@host:8/a?b"])
def test_a_password_in_the_url_is_refused_and_not_printed(url):
    with pytest.raises(UserError, match="is given with a password") as error:
        RemoteFolder(url, "--prepared_data")
    assert "secret" not in str(error.value)
    assert "://host:8/a?b" in str(error.value)
    assert "Passwords" in (runs.ROOT / "docs" / "pretraining.md").read_text()
    RemoteFolder("hf://datasets/me/repository@main/a", "--prepared_data")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_errors_that_pass_are_retried_with_one_message(folder, capsys, status):
    with RangeServer(folder, answer=lambda _, count: status if count < 2 else None) as server:
        remote = RemoteFolder(server.url, "--prepared_data")
        assert remote.read("a", range(5)) == CONTENT[:5]
        assert server.requests["a"] == 3
        problem = f"--prepared_data {server.url}/a cannot be read (HTTP {status}): {CHECK}"
    assert capsys.readouterr().err == f"rank 0: {problem}; trying again for up to 300 s\n"


def test_errors_that_do_not_pass_in_time_end_the_reading(folder, monkeypatch):
    clock = [0.0]  # moved by the pauses alone, so that a busy machine changes nothing

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with RangeServer(folder, answer=lambda *_: 503) as server:
        found = refusal(server.url, "a", range(5), patience=0.01)
        assert found.endswith(f"/a cannot be read (HTTP 503): {CHECK}")
        assert server.requests["a"] == 4  # after pauses of 1, 2 and 4 ms, each up to half shorter or longer
    nothing = f"http://127.0.0.1:{runs.free_port()}"
    assert "cannot be read (ClientConnectorError" in refusal(nothing, "a", patience=0.01)


def test_errors_that_stay_are_not_retried(folder):
    missing = {404: "does not exist: check the URL, or copy the prepared folder there again"}
    for status in (404, 403, 400):
        with RangeServer(folder, answer=lambda *_, status=status: status) as server:
            expected = missing.get(status, f"cannot be read (HTTP {status}): {CHECK}")
            assert refusal(server.url, "a", range(5)) == f"--prepared_data {server.url}/a {expected}"
            assert server.requests["a"] == 1


def test_a_file_that_was_cut_short_or_changed_is_read_three_times_and_then_refused(folder):
    with RangeServer(folder) as server:
        problem = "differs from its index, was cut short, or was sent without ranges: copy the folder there again"
        message = f"--prepared_data {server.url}/a {problem}"
        assert refusal(server.url, "a", range(250, 260)) == message
        assert server.requests["a"] == 3
        assert refusal(server.url, "a", range(5), lambda content: content == b"other") == message
        damaged, remote = iter([False, False, True]), RemoteFolder(server.url, "--prepared_data")
        assert remote.read("a", range(5), lambda _: next(damaged)) == CONTENT[:5], "damaged on their way"


def test_a_server_without_ranges_is_refused(folder, monkeypatch):
    monkeypatch.setattr(RangeServer, "_content", lambda *_: (200, CONTENT))
    with RangeServer(folder) as server:
        assert "or was sent without ranges: copy" in refusal(server.url, "a", range(5))
