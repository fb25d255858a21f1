"""Data that changed, or whose changes could not be noticed, are refused."""

import datasets
import pytest
import runs
import torch
from stand_ins import accelerator

from shared.checkpoints.progress import Progress
from shared.options.data_options import DataOptions
from shared.run.resume import refuse_changed_data

CHANGED = (
    "the data have changed since this run began, or other library versions prepared them: restore them to resume, or "
    "begin a new run in another --output_dir"
)


class Data(list):
    """A data set whose only sample is its digest."""

    lengths = (1,)

    def digest(self):
        return self[0]


def problem_with(progress, *data, **settings):
    return runs.problem_of(refuse_changed_data, accelerator(), progress, DataOptions(**settings), *data)


def test_the_digests_are_kept_in_the_state_and_compared_and_the_message_names_only_flags_that_were_given():
    progress = Progress()
    assert problem_with(progress, Data("0"), Data("1")) is None
    progress = Progress.from_state(progress.state())  # through a checkpoint
    assert problem_with(progress, Data("0"), Data("1")) is None
    assert problem_with(progress, Data("0"), Data("2")) == CHANGED
    resumed = problem_with(progress, Data("0"), Data("2"), resume_from_checkpoint="a/step_00000003")
    assert resumed == f"{CHANGED}, without --resume_from_checkpoint"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ()


ROWS = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 9})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Stream(), "Stream can only be read sequentially"),
        (ROWS.to_iterable_dataset(), "IterableDataset can only be read sequentially"),
        (ROWS, "load_data returned a Dataset without lengths and digest"),
    ],
)
def test_data_without_an_index_or_the_required_attributes_are_refused(data, expected):
    assert problem_with(Progress(), data).startswith(expected)
