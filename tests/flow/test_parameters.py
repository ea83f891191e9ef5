import copy
import pickle

import pytest
import torch

import gradpolicy as gp


def test_a_rule_acts_on_each_gradient_before_it_is_accumulated(net, batch, parameter_gradients):
    plain = parameter_gradients(net, batch)
    with gp.install(net, [gp.Scale(2.0, params=["head.*", "!head.bias"])]):
        net.zero_grad(set_to_none=True)
        for _ in range(3):
            net(batch).square().sum().backward()
    torch.testing.assert_close(net.head.weight.grad, 6 * plain["head.weight"])
    torch.testing.assert_close(net.head.bias.grad, 3 * plain["head.bias"])


def test_several_rules_act_in_order(net, batch, parameter_gradients):
    plain = parameter_gradients(net, batch)["head.bias"]
    bound = plain.abs().max().item() / 2
    with gp.install(net, [gp.Clip(value=bound, params="head.bias"), gp.Scale(3.0, params="head.bias")]):
        found = parameter_gradients(net, batch)["head.bias"]
    torch.testing.assert_close(found, 3 * plain.clamp(-bound, bound))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_the_rule_on_its_own_parameters(net, batch, duplicate, parameter_gradients, same):
    with gp.install(net, [gp.Reverse(params="head.bias")]):
        other = duplicate(net)
        assert same(parameter_gradients(net, batch), parameter_gradients(other, batch))
    assert net.head.bias._backward_hooks is None


def test_a_parameter_that_was_replaced_later_is_refused(net, batch):
    with gp.install(net, [gp.Scale(2.0, params="head.weight")]):
        net.head.weight = torch.nn.Parameter(torch.randn(2, 4))
        with pytest.raises(gp.PolicyError, match=r"head.weight.*replaced or sharded"):
            net(batch)


def test_a_stop_gives_exact_zeros(net, batch, parameter_gradients):
    with gp.install(net, [gp.Stop("zero", params="head.bias"), gp.Stop(params="stem.bias")]):
        found = parameter_gradients(net, batch)
    assert not found["head.bias"].any()
    assert not found["stem.bias"].any()
    assert found["head.weight"].any()
