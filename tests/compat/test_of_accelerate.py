"""The installed Accelerate has the private and undocumented attributes that we use."""

from importlib.metadata import version

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from shared.compat import of_accelerate, of_accelerate_fsdp
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")
ACCELERATE = f"accelerate {version('accelerate')}"


def test_prepared_and_registered_objects_are_listed(accelerator):
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    found = of_accelerate.prepared(accelerator)
    other = nn.Linear(1, 1)
    accelerator.register_for_checkpointing(other)
    assert found == (model, optimizer, [other]), f"{ACCELERATE}: _models, _optimizers or _custom_objects is another"
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UserError, match="2 models and 1 optimizer are prepared"):
        of_accelerate.prepared(accelerator)


def test_a_prepared_scheduler_or_loader_is_noticed(accelerator):
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    for each in (torch.utils.data.DataLoader([1, 2]), scheduler):
        accelerator.prepare(each)
        with pytest.raises(AssertionError):
            of_accelerate.prepared(accelerator)
        accelerator.free_memory()
    accelerator.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()))
    assert of_accelerate.prepared(accelerator)[0] is model, f"{ACCELERATE}: free_memory keeps something"


def test_the_state_of_the_process_can_be_reset(accelerator):
    of_accelerate.reset_state(processes=False)
    assert not AcceleratorState._shared_state, f"{ACCELERATE}: AcceleratorState._reset_state leaves something"
    assert PartialState._shared_state
    of_accelerate.reset_state(processes=True)
    assert not PartialState._shared_state, f"{ACCELERATE}: _reset_state leaves the state of the processes"


def test_fsdp_on_a_cpu_has_the_settings_of_the_launcher_also_in_a_new_state(accelerator, monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert not accelerator.is_fsdp2
    of_accelerate_fsdp.use_fsdp_on_cpu(accelerator)
    AcceleratorState(_from_accelerator=True)  # as `prepare_model` makes one
    assert accelerator.is_fsdp2, f"{ACCELERATE}: distributed_type of the states does not switch FSDP on"
    assert accelerator.state.fsdp_plugin.reshard_after_forward is False
    assert type(accelerator.state.fsdp_plugin.cpu_offload) is OffloadPolicy, "a CPU is the host already"
