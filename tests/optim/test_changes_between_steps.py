"""What changes between two steps is seen by the next: memory, strides, dtypes, state, settings, copies."""

import copy

import pytest
import torch

from gradpolicy import MaskedOptimizer

SHAPE = (12, 12)


def made(**options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in range(2)]
    optimizer = MaskedOptimizer(torch.optim.AdamW(parameters, lr=0.1), **options)
    masks = [torch.rand(SHAPE) < 0.5, torch.rand(SHAPE[0], 1) < 0.5]
    optimizer.set_masks(dict(zip(parameters, masks, strict=True)))
    return optimizer


def parameters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def give_gradients(optimizer):
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn(SHAPE).to(parameter.dtype)


def turn_gradient(optimizer, parameter):
    parameter.grad = parameter.grad.t().contiguous().t()


def narrow_data(optimizer, parameter):
    parameter.data, parameter.grad = parameter.data.bfloat16(), None
    parameter.grad = torch.randn(SHAPE).bfloat16()


def replace_moments(optimizer, parameter):
    state = optimizer.state[parameter]
    state.update({key: value * 0.5 for key, value in state.items()})


def move_moments(optimizer, parameter):
    for value in optimizer.state[parameter].values():
        value.data = value.data * 0.5


def ask_for_the_maximum(optimizer, parameter):
    optimizer.param_groups[0]["amsgrad"] = True


def correct_by_tensor(optimizer, parameter):
    optimizer.set_mask(parameter, optimizer.get_mask(parameter), bias_correction="tensor")


def load_inner(optimizer, parameter):
    optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))


def end(change=None, **options):
    """The parameters after six steps, with a change of each before the fourth."""
    optimizer = made(**options)
    for step in range(6):
        give_gradients(optimizer)
        for parameter in parameters_of(optimizer) if change and step == 3 else ():
            change(optimizer, parameter)
        optimizer.step()
    return [parameter.detach().contiguous() for parameter in parameters_of(optimizer)]


@pytest.mark.parametrize("change", [turn_gradient, load_inner, correct_by_tensor])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_what_only_moves_changes_nothing(kernels, change, frozen_state):
    torch.testing.assert_close(end(change, frozen_state=frozen_state), end(frozen_state=frozen_state))


@pytest.mark.parametrize("change", [narrow_data, replace_moments, move_moments, ask_for_the_maximum])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_native_and_reference_kernels_see_the_same_change(use, change, frozen_state):
    untouched, native = end(frozen_state=frozen_state), end(change, frozen_state=frozen_state)
    use("reference")
    tolerance = 0.02 if native[0].dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(native, end(change, frozen_state=frozen_state), rtol=tolerance, atol=tolerance)
    assert not any(torch.equal(own, each.to(own.dtype)) for own, each in zip(native, untouched, strict=True))


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
