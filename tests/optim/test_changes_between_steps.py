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


def for_each(change):
    def on_all(optimizer):
        for parameter in parameters_of(optimizer):
            change(optimizer, parameter)
        return optimizer

    return on_all


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


def load_inner(optimizer):
    optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    return optimizer


WITHOUT_EFFECT = {
    "turn gradient": for_each(turn_gradient),
    "load inner": load_inner,
    "correct by tensor": for_each(correct_by_tensor),
}
WITH_EFFECT = {
    "narrow data": for_each(narrow_data),
    "replace moments": for_each(replace_moments),
    "move moments": for_each(move_moments),
    "ask for the maximum": for_each(ask_for_the_maximum),
}


def end(change, **options):
    optimizer = made(**options)
    for step in range(6):
        give_gradients(optimizer)
        if step == 3:
            optimizer = change(optimizer)
        optimizer.step()
    return [parameter.detach().contiguous() for parameter in parameters_of(optimizer)]


@pytest.mark.parametrize("change", WITHOUT_EFFECT)
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_what_only_moves_changes_nothing(kernels, change, frozen_state):
    untouched = end(lambda optimizer: optimizer, frozen_state=frozen_state)
    for own, other in zip(end(WITHOUT_EFFECT[change], frozen_state=frozen_state), untouched, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("change", WITH_EFFECT)
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_native_and_reference_kernels_see_the_same_change(use, change, frozen_state):
    ends = [end(lambda optimizer: optimizer, frozen_state=frozen_state)]
    for kernels in ("native", "reference"):
        use(kernels)
        ends.append(end(WITH_EFFECT[change], frozen_state=frozen_state))
    untouched, native, reference = ends
    tolerance = 0.02 if native[0].dtype is torch.bfloat16 else 1e-5
    for own, other, before in zip(native, reference, untouched, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
        assert not torch.equal(own, before.to(own.dtype))


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
