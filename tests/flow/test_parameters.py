"""Rules on the gradients of parameters."""

import pytest
import torch

import gradpolicy as gp


def test_acts_before_accumulation(net, batch, parameter_gradients):
    plain = parameter_gradients(net, batch)
    with gp.install(net, [gp.Scale(2.0, params=["head.*", "!head.bias"])]):
        net.zero_grad(set_to_none=True)
        for _ in range(3):
            net(batch).square().sum().backward()
    torch.testing.assert_close(net.head.weight.grad, 6 * plain["head.weight"])
    torch.testing.assert_close(net.head.bias.grad, 3 * plain["head.bias"])


def test_several_rules_act_in_order(net, batch, parameter_gradients):
    with gp.install(net, [gp.Clip(value=0.01, params="head.bias"), gp.Scale(3.0, params="head.bias")]):
        found = parameter_gradients(net, batch)["head.bias"]
    torch.testing.assert_close(found.abs(), torch.full((2,), 0.03))


def test_replaced_parameter_gets_the_rule(net, batch, parameter_gradients):
    plain = parameter_gradients(net, batch)
    with gp.install(net, [gp.Scale(2.0, params="head.weight")]):
        net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
        found = parameter_gradients(net, batch)
    torch.testing.assert_close(found["head.weight"], 2 * plain["head.weight"])
    assert net.head.weight._backward_hooks is None


def test_removed_parameter_is_refused(net, batch):
    with gp.install(net, [gp.Scale(2.0, params="head.weight")]):
        torch.nn.utils.parametrizations.weight_norm(net.head)
        with pytest.raises(gp.PolicyError, match=r"'head.weight' is gone"):
            net(batch)


def test_thawed_parameter_gets_the_rule(net, batch, parameter_gradients, snapshot):
    plain = parameter_gradients(net, batch)["head.weight"]
    net.zero_grad(set_to_none=True)
    net.head.weight.requires_grad_(False)
    before = snapshot(net)
    with gp.install(net, [gp.Scale(2.0, params="head.weight")]):
        assert parameter_gradients(net, batch)["head.weight"] is None
        net.head.weight.requires_grad_(True)
        torch.testing.assert_close(parameter_gradients(net, batch)["head.weight"], 2 * plain)
        net.zero_grad(set_to_none=True)
        net.head.weight.requires_grad_(False)
    assert snapshot(net) == before


def test_compiled_code_refuses_replaced_parameters(net, batch, parameter_gradients, compiled):
    compiled = compiled(net, backend="eager")
    with gp.install(net, [gp.Scale(2.0, params="head.weight")]):
        expected = parameter_gradients(net, batch)
        found = parameter_gradients(net, batch, call=compiled)
        torch.testing.assert_close(found["head.weight"], expected["head.weight"])
        net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
        with pytest.raises(Exception, match=r"another tensor for parameter 'head.weight'"):
            compiled(batch)
