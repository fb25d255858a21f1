"""Data that changed are refused."""

from dataclasses import dataclass

import runs
from stand_ins import accelerator

from shared.checkpoints.progress import Progress
from shared.options.data_options import DataOptions
from shared.run.resume import refuse_changed_data


@dataclass
class Data:
    """A data set of three samples, with a digest."""

    version: int = 0
    lengths = (1, 1, 1)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return i

    def digest(self):
        return str(self.version)


def refusal(config, progress, *data):
    return runs.refusal(refuse_changed_data, accelerator(), progress, config, *data)


def test_the_digests_are_kept_in_the_state_and_compared(tmp_path):
    config = DataOptions(output_dir=str(tmp_path / "run"))
    progress = Progress()
    refuse_changed_data(accelerator(), progress, config, Data(), Data(1))
    progress = Progress.from_state(progress.state())  # through a checkpoint
    refuse_changed_data(accelerator(), progress, config, Data(), Data(1))
    assert refusal(config, progress, Data(), Data(2)) == (
        "the data have changed since this run began, or other library versions prepared them: restore them to resume, "
        "or begin a new run in another --output_dir"
    )


def test_the_message_names_only_flags_that_were_given(tmp_path):
    progress = Progress(data=["0"])
    given = DataOptions(output_dir=str(tmp_path / "run"), resume_from_checkpoint=str(tmp_path))
    assert refusal(given, progress, Data(1)).endswith(", without --resume_from_checkpoint")


def test_the_state_of_an_older_version_has_counts_which_are_ignored(tmp_path):
    config = DataOptions(output_dir=str(tmp_path / "run"))
    old = Progress.from_state(Progress(data=["0"]).state() | {"data_counts": {"the training data": {"samples": 3}}})
    refuse_changed_data(accelerator(), old, config, Data())
    assert refusal(config, old, Data(1)).startswith("the data have changed since this run began")
