"""What changes between two steps is seen by the next."""

import pytest
import torch

from gradpolicy import MaskedOptimizer

SHAPE = (12, 12)


def turn_gradient(optimizer, parameter):
    parameter.grad = parameter.grad.t().contiguous().t()


def narrow_data(optimizer, parameter):
    parameter.data, parameter.grad = parameter.data.bfloat16(), None
    parameter.grad = torch.randn(SHAPE).bfloat16()


def replace_moments(optimizer, parameter):
    state = optimizer.state[parameter]
    state.update({key: value * 0.5 for key, value in state.items()})


def ask_for_the_maximum(optimizer, parameter):
    optimizer.param_groups[0]["amsgrad"] = True


def end(change, frozen_state):
    """The parameter after six steps, with a change before the fourth."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SHAPE))
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1), frozen_state)
    optimizer.set_mask(parameter, torch.rand(SHAPE) < 0.5)
    for step in range(6):
        parameter.grad = torch.randn(SHAPE).to(parameter.dtype)
        if step == 3:
            change(optimizer, parameter)
        optimizer.step()
    return parameter.detach().float().contiguous()


@pytest.mark.parametrize("change", [turn_gradient, narrow_data, replace_moments, ask_for_the_maximum])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_a_step_sees_a_change(change, frozen_state):
    changed, untouched = end(change, frozen_state), end(lambda *_: None, frozen_state)
    assert torch.allclose(changed, untouched) is (change is turn_gradient)


def test_an_update_shows_in_the_version_that_autograd_checks():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]))
    optimizer.set_mask(weight, torch.tensor([True, False, True]))
    for _ in range(2):
        loss = (weight * weight.exp()).sum()
        weight.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
