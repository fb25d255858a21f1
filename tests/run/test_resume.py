"""Data that changed are refused, and the message says what differs."""

from dataclasses import dataclass, field

import pytest
import runs
from stand_ins import accelerator

from shared.checkpoints.progress import Progress
from shared.options.data_options import DataOptions
from shared.run.resume import refuse_changed_data


@dataclass
class Data:
    """A data set of nothing but its counts; without any, it has no summary."""

    counts: dict[str, int] = field(default_factory=dict)
    version: int = 0
    lengths = (1, 1, 1)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return i

    def digest(self):
        return f"{self.counts} {self.version}"

    def __getattr__(self, name):
        if name == "summary" and self.counts:
            return lambda: self.counts
        raise AttributeError(name)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "a.csv").write_text("text")
    return DataOptions(output_dir=str(tmp_path / "run"), train_file=(str(tmp_path / "a.csv"),))


def refusal(config, progress, *data):
    return runs.refusal(refuse_changed_data, accelerator(), progress, config, *data)


def test_the_counts_and_the_files_that_differ_are_named(config, tmp_path):
    progress = Progress()
    validation = Data({"images": 2})
    refuse_changed_data(accelerator(), progress, config, Data({"images": 9, "images of class cat": 9}), validation)
    progress = Progress.from_state(progress.state())  # through a checkpoint
    (tmp_path / "a.csv").write_text("a longer text")
    message = refusal(config, progress, Data({"images": 1009, "images of class cow": 1009}), validation)
    assert message == (
        "the data have changed since this run began (the training data: 1,009 images instead of 9; the training data: "
        "0 images of class cat instead of 9; the training data: 1,009 images of class cow instead of 0; --train_file: "
        "13 bytes in a.csv instead of 4): restore them to resume, or begin a new run in another --output_dir"
    )


def test_of_many_differences_the_first_few_are_named(config):
    progress = Progress()
    refuse_changed_data(accelerator(), progress, config, Data({str(i): 1 for i in range(9)}))
    message = refusal(config, progress, Data({str(i): 2 for i in range(9)}))
    assert "the training data: 2 3 instead of 1; and 5 more differences)" in message


def test_without_counts_that_differ_another_cause_is_named_and_only_flags_that_were_given(config, tmp_path):
    progress = Progress()
    refuse_changed_data(accelerator(), progress, config, Data())
    given = DataOptions(output_dir=config.output_dir, resume_from_checkpoint=str(tmp_path))
    assert "began, or other library versions prepared them: restore" in refusal(config, progress, Data(version=1))
    assert refusal(given, progress, Data(version=1)).endswith(", without --resume_from_checkpoint")


def test_a_checkpoint_of_an_older_version_without_counts_resumes_with_the_same_data(config):
    progress = Progress()
    refuse_changed_data(accelerator(), progress, config, Data({"images": 9}))
    state = {name: value for name, value in progress.state().items() if name != "data_counts"}
    refuse_changed_data(accelerator(), Progress.from_state(state), config, Data({"images": 9}))
    message = refusal(config, Progress.from_state(state), Data({"images": 8}))
    assert message.startswith("the data have changed since this run began, or other library versions")
