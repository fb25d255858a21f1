"""An exported model is uploaded to the Hub on request."""

from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest

from shared.errors import UserError
from shared.extras.hub import Upload
from shared.options.extra_options import ExtraOptions


class Hub:
    """Stands in for the Hub's client: records its requests, or fails."""

    asked: ClassVar[list] = []
    failure: Exception | None = None

    def create_repo(self, name, exist_ok):
        assert exist_ok
        if self.failure:
            raise self.failure
        self.asked.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path, repo_id, commit_message):
        self.asked.append((sorted(path.name for path in folder_path.iterdir()), repo_id))
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(Hub, "failure", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "run/model"
    folder.mkdir(parents=True)
    (folder / "weights").touch()
    return folder


def uploaded(model, **settings):
    """End a run on one process with these settings."""
    hook = Upload()
    hook.accelerator = SimpleNamespace(is_main_process=True, num_processes=1, print=print)
    hook.config = ExtraOptions(**settings)
    hook.exported(model)


@pytest.mark.parametrize(("given", "name"), [(None, "run"), ("mine", "mine")])
def test_the_model_is_uploaded_under_its_name(hub, model, capsys, given, name):
    uploaded(model, push_to_hub=True, hub_model_id=given)
    assert hub.asked == [name, (["weights"], f"me/{name}")]
    assert f"uploaded to https://hub/me/{name}" in capsys.readouterr().out


def test_a_failed_upload_keeps_the_model_and_its_error_tells_how_to_retry(hub, monkeypatch, model):
    monkeypatch.setattr(hub, "failure", ConnectionError("401 Client Error.\n\nInvalid token"))
    with pytest.raises(UserError, match=f"^--push_to_hub: {model} could not be uploaded, start again to retry: 401 Cl"):
        uploaded(model, push_to_hub=True, hub_model_id="mine")
    assert (model / "weights").exists()
