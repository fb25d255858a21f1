"""Flags, Hub names, folders and disks that a run cannot use cause a one-line error."""

import errno
import resource
import socket
import tempfile

import pytest
import runs
from huggingface_hub import constants
from refusals import files, refusal

from shared.checkpoints import saving
from shared.config import options
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


# Batches and metrics


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max_tokens_per_micro_batch", 20], "--max_tokens_per_micro_batch 20 is smaller than sample "),
        (
            ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2],
            "--global_batch_size 12 is not 4 per device x 1 process x 2 accumulation steps = 8: leave out one of",
        ),
        (
            ["--metric_for_best_model", "bleu"],
            "--metric_for_best_model bleu is not computed: use one of loss, accuracy",
        ),
        (["--metric_name", "pearson"], "--metric_name pearson does not fit classification"),
    ],
)
def test_flags_that_conflict_are_refused(train, tmp_path, flags, expected):
    assert refusal(train, tmp_path, *flags).startswith(expected)
    assert not files(tmp_path)


# The Hub


@pytest.fixture
def attempts(monkeypatch):
    """The addresses of attempted connections; each attempt fails, as without a network."""
    tried = []

    def fail(address, *_, **__):
        tried.append(address)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", fail)
    return tried


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [("--model_name_or_path", "train a new encoder"), ("--dataset_name", "train on the embedded docstrings")],
)
def test_a_hub_name_without_a_network_is_tried_once(nlp, texts, attempts, tmp_path, flag, way_out):
    data = [] if flag == "--dataset_name" else [str(word) for word in texts]
    config = options.parse(nlp.Config, [*data, flag, "nobody/nothing", "--output_dir", str(tmp_path)])
    with pytest.raises(UserError, match=rf"{flag} nobody/nothing .*there is no network to .*: .*{way_out}"):
        nlp.main(config)
    assert len(attempts) == 1
    assert not files(tmp_path)


def test_an_upload_that_cannot_succeed_is_refused_before_training(train, attempts, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    message = refusal(train, tmp_path, "--push_to_hub")
    assert message.startswith("--push_to_hub: there is no network to ")
    assert len(attempts) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert refusal(train, tmp_path, "--push_to_hub").startswith("--push_to_hub requires a token: set HF_TOKEN")
    assert len(attempts) == 1
    assert not files(tmp_path)


# The output folder


def test_a_folder_that_cannot_be_written_is_refused(train, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file/run", "Not a directory")):
        message = refusal(train, output)
        start, end = f"--output_dir {output} cannot be written ({reason}): ", ", or name another folder"
        assert message.startswith(start)
        assert message.endswith(end)
        assert "space" not in message[len(start) :]
    assert (tmp_path / "file").read_text() == "mine"

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert "cannot be written (No space left on device)" in refusal(train, tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "what"), [([], "checkpoints/step_00000008"), (["--checkpointing_steps", "no"], "model")]
)
def test_a_run_ends_with_a_one_line_error_if_the_disk_fills_up(train, tmp_path, monkeypatch, flags, what):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the weights take 138 kB
    try:
        message = refusal(train, tmp_path, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path / what} (" in message
    assert "raise the limit on the size of a file (ulimit -f)" in message
    assert "space" not in message
    assert not list(tmp_path.glob("model*"))
    assert len(runs.training_lines(tmp_path)) == 4
