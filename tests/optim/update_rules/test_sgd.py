"""SGD's momentum: when it begins, and how much of a gradient goes into it."""

import pytest
import torch

import gradpolicy as gp

SETTINGS = {"lr": 1.0, "momentum": 0.9, "dampening": 0.3}


def test_a_first_step_with_a_gradient_of_zeros_counts_as_one():
    weight, alone = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = gp.MaskedOptimizer(torch.optim.SGD([weight], **SETTINGS))
    plain = torch.optim.SGD([alone], **SETTINGS)
    for step, gradient in enumerate([0.0, 1.0, 1.0]):
        if step == 1:
            optimizer.set_mask(weight, torch.tensor([True, False]))
        for parameter in (weight, alone):
            parameter.grad = torch.full((2,), gradient)
        optimizer.step()
        plain.step()
    assert weight[0] == alone[0]
    assert weight[1] == 0


def course(frozen_state, masks, reload_at=None):
    """The updates of a tensor whose one count goes on while its entries lose their momentum."""

    def make():
        inner = torch.optim.SGD([weight], **SETTINGS)
        return gp.MaskedOptimizer(inner, frozen_state=frozen_state, bias_correction="tensor")

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, updates = make(), []
    for step, mask in enumerate(masks):
        optimizer.set_mask(weight, mask)
        if step == reload_at:
            saved = optimizer.state_dict()
            del optimizer
            optimizer = make()
            optimizer.load_state_dict(saved)
        before = weight.detach().clone()
        weight.grad = torch.ones(2)
        optimizer.step()
        updates.append((weight.detach() - before).tolist())
    return updates


FIRST = torch.tensor([True, False])


@pytest.mark.parametrize("reload_at", [None, 2])
@pytest.mark.parametrize("thaw", [None, FIRST], ids=["all", "some"])
def test_under_one_count_for_the_tensor_dropped_momentum_is_as_zeroed(thaw, reload_at):
    masks = [None, FIRST, False, thaw, None]
    dropped = course("drop", masks, reload_at)
    assert dropped == course("zero", masks)
    # The momentum is empty, but the tensor is no new one: 1 - 0.3 of the gradient goes in.
    assert dropped[3][0] == pytest.approx(-0.7)
