import pytest
import torch
from torch import nn

import gradpolicy as gp


@pytest.mark.parametrize("std", [0.5, torch.tensor(0.5)])
def test_noise_of_the_given_size_is_added(apply_rule, std):
    grad = torch.full((200, 200), 3.0)
    found = apply_rule("noise", grad, grad, std=std)
    assert abs(found.mean().item() - 3.0) < 0.02
    assert abs(found.std().item() - 0.5) < 0.02


def test_noise_comes_from_torch_s_generator_and_follows_the_loss_scale(apply_rule):
    grad = torch.zeros(5)
    draws = []
    for scale in (1.0, 1.0, 8.0):
        torch.manual_seed(3)
        draws.append(apply_rule("noise", grad, grad, std=0.1, loss_scale=scale))
    assert torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws[2], 8 * draws[0])


def test_noise_at_a_parameter_a_module_and_an_operation_leaves_the_forward_as_it_is():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = layer(x)
    plain.sum().backward()
    expected = layer.weight.grad.clone()
    for where in ({"params": "weight"}, {"modules": "*", "at": "output"}, {"ops": ["linear"], "own": True}):
        layer.zero_grad()
        with gp.install(layer, [gp.UseRule("noise", parameters={"std": 0.1}, **where)], strict=True):
            found = layer(x)
            found.sum().backward()
        assert torch.equal(found, plain)
        assert not torch.equal(layer.weight.grad, expected)
        assert (layer.weight.grad - expected).abs().max() < 5


def test_noise_may_fade_with_the_step():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    fading = gp.UseRule("noise", parameters={"std": gp.schedules.Linear(1.0, 0.0, steps=10)}, params="weight")
    with gp.install(layer, [fading]) as installed:
        installed.update(step=10)
        layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))
