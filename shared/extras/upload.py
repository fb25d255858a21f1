"""`--push_to_hub`: the exported model goes to the Hub at the end."""

from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.extras.hub import require_upload
from shared.monitoring.hooks import Hook
from shared.processes.collectives import on_main_process


class Upload(Hook):
    """Uploads `model/`, if --push_to_hub is given."""

    config: Any = None

    def opened(self, run: Any) -> None:
        """Refuse a run whose model could not be uploaded."""
        self.config = run.config
        if self.config.push_to_hub:
            on_main_process(run.accelerator, require_upload)

    def exported(self, folder: Path) -> None:
        """Upload the model and print its address. Only the main process calls this."""
        if self.config.push_to_hub:
            print(f"uploaded to {push(folder, self.config.hub_model_id)}")


def push(model_folder: Path, name: str | None) -> str:
    """Upload `model/` to the Hub as `name` (default: the name of the output folder); return its address.

    Raises:
        UserError: the upload failed; the local model is kept.
    """
    from huggingface_hub import HfApi

    name = name or model_folder.resolve().parent.name
    try:
        api = HfApi()
        name = api.create_repo(name, exist_ok=True).repo_id
        commit = "Train with accelerate-recipes"
        return str(api.upload_folder(folder_path=model_folder, repo_id=name, commit_message=commit))
    except Exception as error:  # of a dozen types; the exported model is complete and is kept after any of them
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--push_to_hub: {name} could not be uploaded ({reason}): start again to retry, or leave the flag out; "
            f"the model is in {model_folder}"
        ) from None
