"""SGD's momentum: when it begins, and how much of a gradient goes into it."""

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
