"""Activation checkpointing: right, or refused; never silently plain."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(torch.round(2 * self.linear(x)))


class Block(nn.Module):
    """Runs its inner module, or raw operations, under a checkpoint of a kind."""

    def __init__(self, reentrant, raw):
        super().__init__()
        self.reentrant, self.raw = reentrant, raw
        self.inner = Inner()

    def forward(self, x):
        run = (lambda x: torch.round(2 * self.inner.linear(x)).relu()) if self.raw else self.inner
        return run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)


def of_kind(reentrant, raw=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(reentrant, raw))


@pytest.mark.parametrize(
    ("reentrant", "policy"),
    [(True, gp.StraightThrough("tanh")), (True, gp.Guided()), (False, gp.StraightThrough("tanh"))],
)
def test_checkpointed_operations_are_refused(reentrant, policy, batch):
    with (
        gp.install(of_kind(reentrant, raw=True), [policy]) as installed,
        pytest.raises(gp.PolicyError, match="checkpointed function"),
    ):
        installed.model(batch)


def test_checkpointed_operations_with_filters(batch, parameter_gradients, same):
    policies = [gp.Guided(), gp.StraightThrough(ops="ceil")]
    with gp.install(of_kind(None, raw=True), policies) as installed:
        expected = parameter_gradients(installed.model, batch)
    with gp.install(of_kind(False, raw=True), policies) as installed:
        assert same(parameter_gradients(installed.model, batch), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_block_around_checkpoints_is_refused(reentrant, batch):
    with gp.gradient_override({"round": "tanh"}), pytest.raises(gp.PolicyError, match="entered outside"):
        of_kind(reentrant)(batch)


def test_without_a_graph_nothing_is_refused(batch):
    model = of_kind(True, raw=True)
    with (
        torch.no_grad(),
        gp.install(model, [gp.Guided()]),
        gp.gradient_override({"round": "tanh"}),
        pytest.warns(UserWarning, match="requires_grad"),
    ):
        assert not model(batch).requires_grad


CHANGES = {
    "removed": lambda installed: installed.remove(),
    "switched": lambda installed: installed.set_active("rounding", False),
    "schedules": lambda installed: installed.update(step=7),
}
CHANGING = {
    "rounding": gp.StraightThrough("tanh", parameters={"slope": lambda step: 1.0 + step}),
    "guide": gp.Guided(),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_before_recomputation_are_refused(change, reentrant, batch):
    with gp.install(of_kind(reentrant), CHANGING) as installed:
        result = installed.model(batch)
        CHANGES[change](installed)
        with pytest.raises(gp.PolicyError, match=f"{change}.* between forward and backward"):
            result.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_installing_before_recomputation_is_refused(reentrant, batch):
    result = (model := of_kind(reentrant))(batch).sum()
    with (
        gp.install(model, CHANGING),
        pytest.raises(gp.PolicyError, match="put on between forward and backward"),
    ):
        result.backward()


@pytest.mark.parametrize("change", CHANGES)
def test_changes_without_recomputation(change, batch, parameter_gradients, same):
    policies = CHANGING if change != "switched" else {"rounding": gp.StraightThrough(), "guide": gp.Guided()}
    kind = of_kind(None if policies is CHANGING else False)
    with gp.install(kind, policies) as installed:
        expected = parameter_gradients(installed.model, batch)

        def run(x):
            result = installed.model(x)
            CHANGES[change](installed)
            return result

        assert same(parameter_gradients(installed.model, batch, call=run), expected)


def test_removing_parameter_rules_before_backward_is_refused(net, batch):
    with gp.install(net, [gp.Scale(2.0, params="head.bias")]):
        result = net(batch)
    with pytest.raises(gp.PolicyError, match=r"removed between forward and backward.*params="):
        result.sum().backward()


def test_block_within_a_reentrant_checkpoint(recwarn):
    def rounded(x, name):
        with gp.gradient_override({name: "identity"}):
            return torch.round(x) * 2

    x = torch.randn(3, requires_grad=True)
    checkpoint(rounded, x, "round", use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert not recwarn.list
    y = checkpoint(rounded, x, "floor", use_reentrant=True)
    with pytest.warns(UserWarning, match="'floor' was never met"):
        y.sum().backward()
