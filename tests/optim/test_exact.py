"""What the kernel was told of a tensor once serves at later steps: never when something has moved since."""

import copy
import pickle

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.optim import exact
from gradpolicy.optim.native import adam as native_adam
from gradpolicy.optim.native import moves as native

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
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


def move_data(optimizer, parameter):
    parameter.data = parameter.data.clone()


def turn_data(optimizer, parameter):
    parameter.data = parameter.data.t().contiguous().t()


def turn_gradient(optimizer, parameter):
    parameter.grad = parameter.grad.t().contiguous().t()


def narrow_data(optimizer, parameter):
    parameter.data, parameter.grad = parameter.data.bfloat16(), None
    parameter.grad = torch.randn(SHAPE).bfloat16()


def forget_gradient(optimizer, parameter):
    parameter.grad = None


def replace_moments(optimizer, parameter):
    state = optimizer.state[parameter]
    state.update({key: value * 0.5 for key, value in state.items()})


def move_moments(optimizer, parameter):
    for value in optimizer.state[parameter].values():
        value.data = value.data * 0.5


def lose_state(optimizer, parameter):
    del optimizer.state[parameter]


def ask_for_the_maximum(optimizer, parameter):
    optimizer.param_groups[0]["amsgrad"] = True


def correct_by_tensor(optimizer, parameter):
    optimizer.set_mask(parameter, optimizer.get_mask(parameter), bias_correction="tensor")


def change_mask(optimizer, parameter):
    optimizer.set_mask(parameter, ~optimizer.get_mask(parameter))


def thaw(optimizer, parameter):
    optimizer.set_mask(parameter, None)


def change_settings(optimizer, parameter):
    optimizer.param_groups[0].update(lr=0.03, betas=(0.5, 0.6), weight_decay=0.3, maximize=True)


def load(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def load_inner(optimizer):
    optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    return optimizer


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


SURPRISES = [
    *map(for_each, [move_data, turn_data, turn_gradient, narrow_data, forget_gradient, replace_moments]),
    *map(for_each, [move_moments, lose_state, ask_for_the_maximum, correct_by_tensor, change_mask, thaw]),
    *(for_each(change_settings), load, load_inner, copy.deepcopy, pickled),
]
NAMES = """move_data turn_data turn_gradient narrow_data forget_gradient replace_moments move_moments
    lose_state ask_for_the_maximum correct_by_tensor change_mask thaw change_settings load load_inner
    deepcopy pickled"""


def end(surprise, **options):
    optimizer = made(**options)
    for step in range(6):
        give_gradients(optimizer)
        if step == 3:
            optimizer = surprise(optimizer)
        optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [parameter.detach().contiguous() for parameter in parameters_of(optimizer)], moments


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("surprise", SURPRISES, ids=NAMES.split())
def test_a_surprise_between_steps_is_seen(monkeypatch, surprise, frozen_state):
    seen = end(surprise, frozen_state=frozen_state)
    monkeypatch.setattr(exact, "follow", lambda *arguments: False)
    for own, anew in zip(seen, end(surprise, frozen_state=frozen_state), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, anew, strict=True))


def test_a_copy_leaves_the_original_alone():
    optimizer = made()
    for _ in range(2):
        give_gradients(optimizer)
        optimizer.step()
    other, before = copy.deepcopy(optimizer), [p.detach().clone() for p in parameters_of(optimizer)]
    give_gradients(other)
    other.step()
    assert all(map(torch.equal, parameters_of(optimizer), before))
    assert not any(map(torch.equal, parameters_of(other), before))


def test_nothing_is_prepared_anew_while_nothing_changes(monkeypatch):
    optimizer = made()
    for _ in range(2):
        give_gradients(optimizer)
        optimizer.step()
    monkeypatch.setattr(native_adam, "Record", None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner, 1, 0.5)
    for _ in range(3):
        give_gradients(optimizer)
        optimizer.step()
        scheduler.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters_of(optimizer)] == [5, 5]


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
