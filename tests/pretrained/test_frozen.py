"""A frozen second model stays as it is, and its wrong path is reported under its own flag."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.errors import UserError
from shared.pretrained.from_pretrained import FrozenModel, load_pretrained
from shared.pretrained.tokenizers import load_tokenizer


def test_a_frozen_model_in_another_one_is_neither_trained_nor_saved():
    student = nn.Linear(3, 2)
    student.teacher = FrozenModel(Accelerator(cpu=True), nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    student.train()
    assert student.state_dict().keys() == {"weight", "bias"}
    rows = torch.ones(2, 3, requires_grad=True)
    first, second = student.teacher(rows), student.teacher(rows)
    assert torch.equal(first, second), "dropout is off"
    assert not first.requires_grad


@pytest.mark.parametrize("load", [load_tokenizer, lambda *args, **more: load_pretrained("AutoModel", *args, **more)])
def test_a_wrong_path_is_reported_under_the_flag_that_gives_it(load):
    with pytest.raises(UserError, match=r"^--teacher_name_or_path /nowhere has no config.json"):
        load("/nowhere", flag="--teacher_name_or_path")
