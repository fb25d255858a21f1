"""Several optimizers act as one: steps, skipped updates, checkpoints."""

import copy

import runs
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import parameters_to_vector

from shared.config.options import Options
from shared.models.optimizers import ChainedOptimizers
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, require_all, set_learning_rate, step_if_finite
from shared.run.launch_card import trained_by

RATE = 0.1


def model_of_two_parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def two_optimizers(model):
    sgd = make_optimizer(model[0], Options(optim="sgd", learning_rate=RATE))
    for parameter in model[0].parameters():  # it begins with a state
        sgd.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    return torch.optim.AdamW([{"params": [*model[1].parameters()], "lr_scale": 0.5}], lr=RATE, fused=True), sgd


def backward(model, step):
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()


def steps(model, optimizer, numbers):
    for step in numbers:
        set_learning_rate(optimizer, RATE / (1 + step))
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def test_chained_optimizers_make_the_steps_of_each_and_resume_from_one_state_dict():
    one, other = model_of_two_parts(), model_of_two_parts()
    chained = ChainedOptimizers(two_optimizers(one))
    assert trained_by(chained) == "18 trained by adamw, 25 by sgd"  # on the launch card
    steps(one, chained, range(4))
    optimizers = two_optimizers(other)
    for step in range(4):
        backward(other, step)
        for optimizer in optimizers:
            set_learning_rate(optimizer, RATE / (1 + step))
            optimizer.step()
        other.zero_grad()
    assert torch.equal(parameters_to_vector(one.parameters()), parameters_to_vector(other.parameters()))

    resumed = copy.deepcopy(one)
    again = ChainedOptimizers(two_optimizers(resumed))
    set_learning_rate(again, RATE)  # the state dict has another rate
    again.load_state_dict(copy.deepcopy(chained.state_dict()))
    for model, optimizer in ((one, chained), (resumed, again)):
        steps(model, optimizer, range(4, 6))
    assert torch.equal(parameters_to_vector(one.parameters()), parameters_to_vector(resumed.parameters()))
    again.param_groups[1]["initial_lr"] = RATE  # as a scheduler of the second one leaves it
    assert "a scheduler object sets the learning rate" in runs.refusal(set_learning_rate, again, RATE)


def test_a_step_with_gradients_that_are_not_finite_is_skipped_by_all():
    model, accelerator = model_of_two_parts(), Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(ChainedOptimizers(two_optimizers(model)))
    before = parameters_to_vector(model.parameters())
    backward(model, 0)
    model[0].bias.grad[0] = torch.inf
    grad_norm = gradients.clip(accelerator, [*model.parameters()], 1.0)
    assert float(step_if_finite(accelerator, optimizer, grad_norm)) == 1
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    optimizer.optimizer.found_inf = torch.tensor(1.0)  # on a GPU the kernels read it
    optimizer.optimizer.step()
    assert [float(each.found_inf) for each in optimizer.optimizer.optimizers] == [1, 1]
    assert torch.equal(parameters_to_vector(model.parameters()), before)


def test_a_parameter_that_no_optimizer_has_is_refused():
    model = model_of_two_parts()
    assert "the optimizer does not have 1.weight, 1.bias" in runs.refusal(require_all, two_optimizers(model)[1], model)
    model[1].requires_grad_(False)
    require_all(two_optimizers(model)[1], model)
