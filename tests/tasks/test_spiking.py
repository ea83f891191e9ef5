"""Spiking neurons against a simulation by hand, and what learns with and without a policy."""

import torch

import gradpolicy as gp
from gradpolicy.tasks.spiking import Neurons, SpikingNetwork


def test_a_neuron_follows_its_formula() -> None:
    neurons, potential, spikes = Neurons(decay=0.5), torch.zeros(1), []
    for _ in range(6):
        spike, potential = neurons(potential, torch.tensor([0.6]))
        spikes.append(spike.item())
    v, expected = 0.0, []
    for _ in range(6):
        v = 0.5 * v + 0.6
        expected.append(float(v > 1))
        v -= expected[-1]
    assert spikes == expected
    assert expected == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_rates_are_shares_of_the_steps() -> None:
    model = SpikingNetwork(steps=4)
    rates = []
    model.readout.register_forward_pre_hook(lambda module, inputs: rates.append(inputs[0] * 4))
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert set(rates[0].unique().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}


def test_below_the_spikes_nothing_learns_without_a_policy() -> None:
    images = torch.rand(8, 1, 8, 8)
    model = SpikingNetwork()
    model(images).square().sum().backward()
    assert model.currents.weight.grad is None
    policy = gp.StraightThrough("fast_sigmoid", ops=["gt"], modules="neurons")
    with gp.install(model, [policy]):
        model(images).square().sum().backward()
    assert model.currents.weight.grad.any()


def test_the_gradient_of_one_spike_is_the_surrogate() -> None:
    current = torch.tensor([0.3, 0.9, 1.4], requires_grad=True)
    neurons = Neurons()
    with gp.install(neurons, [gp.StraightThrough("fast_sigmoid", parameters={"slope": 5.0}, ops=["gt"])]):
        spikes, _ = neurons(torch.zeros(3), current)
    (gradient,) = torch.autograd.grad(spikes.sum(), current)
    torch.testing.assert_close(gradient, 1 / (5 * (current.detach() - 1).abs() + 1) ** 2)
