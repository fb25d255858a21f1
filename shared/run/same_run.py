"""Whether a start goes on with the run that its folder holds: the same settings, the same data, the same model."""

import glob
import hashlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.config import options
from shared.errors import UserError
from shared.plan.loading import refuse_iterable
from shared.processes.collectives import gather

MODEL = "model_name_or_path"
# What of a model's folder still counts when the weights come from a checkpoint; the tokenizer is in the data's digest.
MODEL_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def refuse_another_run(
    stored: Mapping[str, Any], config: options.Options, where: Path, elsewhere: Mapping[str, Any] | None = None
) -> None:
    """Refuse to go on with a run that other settings decided; but for those `elsewhere`, see `moved`.

    Args:
        where: its folder, or the checkpoint to go on from.

    Raises:
        UserError: shows the difference and both ways out.
    """
    changed = options.differences(stored, config)
    changed = {name: values for name, values in changed.items() if name not in (elsewhere or {})}
    if not changed:
        return
    here = Path(config.output_dir).resolve()
    if where.resolve() == here or where.resolve().parent == resuming.folder(here):
        raise UserError(
            f"{where} holds a run decided by other settings{shown(changed)}: give the old values to go on with it, or "
            "another --output_dir for a new run"
        )
    raise UserError(
        f"{where} belongs to a run decided by other settings{shown(changed)}: give the old values to go on with it, or "
        "leave out --resume_from_checkpoint for a new run, which can begin with the model/ of that one as "
        "--model_name_or_path"
    )


def shown(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """What `options.differences` found, as words in brackets; nothing for no difference."""
    words = ", ".join(
        f"--{name} was {options.shown(old)}, is {options.shown(new)}" for name, (old, new) in changed.items()
    )
    return f" ({words})" if words else ""


def moved(
    stored: Mapping[str, Any], config: options.Options, has_digest: bool, model_before: str | None, model: str | None
) -> dict[str, tuple[str, str]]:
    """Settings that name data, or a model, by another path than before, as {field: (old, new)}.

    Not the path decides, but its content. Data has a digest if the run kept one (`has_digest`), which
    `refuse_changed_data` compares. A model has a digest of its config (`model_digest`): its weights come from the
    checkpoint.
    Two names of one place are the same in any case.

    Raises:
        UserError: the model's folder has another config than before.
    """
    result = {}
    for name in sorted({*config.NAMES_DATA, MODEL}):
        old, new = stored.get(name), options.plain(config).get(name)
        if not old or not new or not all(path.exists() for path in places(new)):
            continue
        same = [path.resolve() for path in places(old)] == [path.resolve() for path in places(new)]
        if old != new and (same or (model_before == model is not None if name == MODEL else has_digest)):
            result[name] = old, new
        if name == MODEL and old == new and None not in (model_before, model) and model_before != model:
            raise UserError(
                f"--{MODEL} {new}: its config is not the one that this run began with: restore it to go on, or name "
                "another --output_dir for a new run"
            )
    return result


def places(names: str | Sequence[str]) -> list[Path]:
    """The paths that a setting names: one, several, or those that a pattern such as data/*.csv finds."""
    each = [names] if isinstance(names, str) else names
    return [Path(path) for name in each for path in (sorted(glob.glob(name)) or [name])]  # noqa: PTH207


def model_digest(config: options.Options) -> str | None:
    """A digest of what a local --model_name_or_path says of the model, beside its weights; None for another model."""
    name = getattr(config, MODEL, None)
    if name is None or not Path(name).is_dir():
        return None
    content = hashlib.sha256()
    for file in MODEL_FILES:
        if (path := Path(name) / file).is_file():
            content.update(f"{file} {path.stat().st_size} ".encode() + path.read_bytes())
    return content.hexdigest()


def refuse_changed_data(accelerator: Any, progress: Progress, *datasets: Any) -> None:
    """Refuse other data than those of the run so far, and data that differ between the machines.

    Call it on every process. Each data set has a `digest()` of what is read from it, which the checkpoints keep.

    Raises:
        UserError: one of the data sets can only be read from front to back, or lacks what a run asks of it; or names
            the machine, or says that the data changed since the run began.
    """
    for data in datasets:
        refuse_iterable(data)
        if lacking := [name for name in ("lengths", "digest") if not hasattr(data, name)]:
            raise UserError(
                f"load_data gave a {type(data).__name__} without {' and '.join(lacking)}: what a run asks of a data "
                "set is what TokenizedText of shared/text/tokenized.py has"
            )
    everybody = gather(accelerator, (socket.gethostname(), [data.digest() for data in datasets]))
    main, digests = everybody[0]
    for rank, (host, others) in enumerate(everybody):
        if others != digests:
            raise UserError(
                f"rank {rank} on {host} has other data than rank 0 on {main}: copy the files, and install the same "
                "versions of the libraries"
            )
    if progress.data not in (None, digests):
        raise UserError(
            "the data are not those that this run began with, or have been prepared by other versions of the "
            "libraries: restore them to go on, or begin a new run, in another --output_dir and without "
            "--resume_from_checkpoint"
        )
    progress.data = digests
