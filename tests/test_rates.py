"""Rates: parameters have settings of their own, as if by param groups made by hand."""

import copy
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=True),
    "foreach adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, foreach=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "fused adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, fused=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}
RATES = {"head.*": 2.0, "*.bias": {"lr": 0.5, "weight_decay": 0.0}, "blocks.*": gp.LayerDecay(0.5)}


def groups_by_hand(model: nn.Module, lr: float = 0.1) -> list[dict[str, Any]]:
    """One group a parameter, as RATES says; the embedding has no rate of its own."""
    groups = []
    for name, parameter in model.named_parameters():
        own: dict[str, Any] = {"params": [parameter]}
        if name.startswith("head."):
            own["lr"] = lr * 2.0
        elif name.endswith(".bias"):
            own |= {"lr": lr * 0.5, "weight_decay": 0.0}
        elif name.startswith("blocks."):
            own["lr"] = lr * 0.5 ** (3 - int(name.split(".")[1]))
        groups.append(own)
    return groups


def train(model: nn.Module, optimizer: Any, tokens: Tensor, steps: int = 5) -> None:
    for _ in range(steps):
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(first: nn.Module, second: nn.Module) -> bool:
    both = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in both)


@pytest.mark.supports("rates", loop="plain")
@pytest.mark.parametrize("kind", MAKES)
def test_rates_give_the_bits_of_param_groups_made_by_hand(stack, tokens, kind: str) -> None:
    peer = copy.deepcopy(stack)
    optimizer = MAKES[kind](stack.parameters())
    with gp.training(stack, optimizer, {"rates": gp.Rates(RATES)}) as wrapped:
        train(stack, wrapped, tokens)
        assert len(wrapped.param_groups) == 1
    train(peer, MAKES[kind](groups_by_hand(peer)), tokens)
    assert equal(stack, peer)
    assert wrapped.param_groups[0]["lr"] == 0.1


def test_a_parameter_that_joins_the_optimizer_gets_its_rate() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    with gp.training(model, optimizer, {"rates": gp.Rates({"*": 0.5})}) as wrapped:
        for joins in (False, True):
            if joins:
                wrapped.add_param_group({"params": [model.weight]})
                before = model.weight.detach().clone()
            wrapped.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            wrapped.step()
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 0.05))


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_rates_go_with_masks(stack, tokens, kind: str) -> None:
    """Masks on param groups made by hand are the reference."""
    peer = copy.deepcopy(stack)
    groups = groups_by_hand(peer)
    for model, given, more in ((stack, stack.parameters(), [gp.Rates(RATES)]), (peer, groups, [])):
        half = gp.Freeze(gp.masks.Random(0.5, every=2), params="blocks.*")
        with gp.training(model, MAKES[kind](given), [half, *more]) as optimizer:
            train(model, optimizer, tokens)
    assert equal(stack, peer)


def test_a_scheduler_sets_the_rate_that_factors_are_on(stack, tokens) -> None:
    peer = copy.deepcopy(stack.double())

    def train_with_scheduler(model: nn.Module, optimizer: Any, inner: Any) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            inner, [10 * group["lr"] for group in inner.param_groups], total_steps=8
        )
        for _ in range(6):
            train(model, optimizer, tokens, 1)
            scheduler.step()

    optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01, weight_decay=0.1)
    with gp.training(stack, optimizer, {"rates": gp.Rates(RATES)}) as wrapped:
        train_with_scheduler(stack, wrapped, optimizer)
    by_hand = torch.optim.AdamW(groups_by_hand(peer, 0.01), lr=0.01, weight_decay=0.1)
    train_with_scheduler(peer, by_hand, by_hand)
    for ours, theirs in zip(stack.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_rates_follow_a_schedule_and_hold_in_their_phase(moves) -> None:
    ramp = gp.schedules.Linear(0.0, 1.0, steps=4)
    assert moves([gp.Rates({"*": ramp})]) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert moves([gp.Rates({"*": 0.5}, when={"start": 1, "stop": 3})]) == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    epochs = gp.Rates({"*": lambda epoch: 2.0**-epoch}, when={"unit": "epoch"})
    assert moves([epochs], steps_per_epoch=2) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    # The factors of several policies are multiplied.
    assert moves([gp.Rates({"*": 0.5}), gp.Rates({"*": 0.5}, when={"start": 1})], 2) == [0.5, 0.25]


def test_the_first_pattern_that_matches_counts(stack) -> None:
    named = dict(stack.named_parameters())
    found = gp.Rates({"head.bias": 3.0, "head.*": 2.0, "*": gp.LayerDecay(0.5)}).settings_of(named)
    assert (found["head.bias"], found["head.weight"]) == ({"lr": 3.0}, {"lr": 2.0})
    # Without the head, the last block is the last of the layers.
    assert [found[f"blocks.{place}.weight"]["lr"] for place in range(4)] == [0.125, 0.25, 0.5, 1.0]
    assert found["embed.weight"] == {"lr": 0.0625}


def test_layer_decay_is_that_of_beit(stack) -> None:
    """``scale ** (layers + 1 - number)``: embedding 0, blocks from 1 on, the head last."""
    numbers = {"embed": 0, "head": 5, **{f"blocks.{place}": place + 1 for place in range(4)}}
    parameters = dict(stack.named_parameters())
    found = gp.LayerDecay(0.75).factors(parameters)
    assert found == {name: 0.75 ** (5 - numbers[name.rpartition(".")[0]]) for name in found}
    by_groups = gp.LayerDecay(0.5, groups=["embed.*", ["blocks.*", "head.*"]]).factors(parameters)
    assert set(by_groups.values()) == {0.5, 1.0}


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(stack, tokens, kind: str) -> None:
    def policies() -> dict[str, gp.Rates | gp.Freeze]:
        ramp = gp.schedules.Cosine(1.0, 0.1, steps=6)
        return {
            "rates": gp.Rates({"blocks.*": {"lr": ramp, "weight_decay": 0.0}}),
            "half": gp.Freeze(gp.masks.Random(0.5, every=2), params="head.*", frozen_state="drop"),
        }

    whole = copy.deepcopy(stack)
    with gp.training(whole, MAKES[kind](whole.parameters()), policies()) as optimizer:
        train(whole, optimizer, tokens, 7)
    with gp.training(stack, MAKES[kind](stack.parameters()), policies()) as optimizer:
        train(stack, optimizer, tokens, 3)
        saved = pickle.dumps((stack.state_dict(), optimizer.state_dict()))
    other, (weights, state) = copy.deepcopy(stack), pickle.loads(saved)
    other.load_state_dict(weights)
    with gp.training(other, MAKES[kind](other.parameters()), policies()) as optimizer:
        optimizer.load_state_dict(state)
        train(other, optimizer, tokens, 4)
    assert equal(other, whole)


@pytest.mark.supports("rates", loop="lightning")
def test_the_callback_sets_rates_and_lifts_them(
    two_layers, loader, make_trainer: Callable[..., Trainer]
) -> None:
    peer = copy.deepcopy(two_layers)
    callback = gp.GradientPolicies({"rates": gp.Rates({"trunk.*": 0.1, "*": {"weight_decay": 0.0}})})
    make_trainer(callbacks=[callback]).fit(two_layers, loader)

    def configure_optimizers() -> torch.optim.Optimizer:
        trunk, head = peer.trunk.parameters(), peer.head.parameters()
        groups = [{"params": trunk, "lr": 0.05 * 0.1}, {"params": head, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05)

    peer.configure_optimizers = configure_optimizers
    make_trainer().fit(peer, loader)
    assert equal(two_layers, peer)


class Counting(torch.optim.SGD):
    """Counts its steps in its param groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_that_writes_to_its_param_groups_is_refused(stack, tokens) -> None:
    optimizer = Counting(stack.parameters(), lr=0.1)
    with gp.training(stack, optimizer, {"rates": gp.Rates({"head.*": 2.0})}) as wrapped:
        with pytest.raises(gp.PolicyError, match="Counting keeps values of its own in its param groups"):
            train(stack, wrapped, tokens, 1)
        assert len(wrapped.param_groups) == 1


def test_the_plan_says_which_rates_there_are(stack, tokens) -> None:
    rates = gp.Rates({"head.*": {"lr": 2.0, "weight_decay": 0.0}, "*": gp.LayerDecay(0.5)})
    planned = gp.plan(stack, {"rates": rates}, lambda model: model(tokens).sum())
    (row,) = planned.rows
    assert (row.what, len(row.parameters), row.entries) == ("Rates", 11, 0)
    assert "rates: lr × 0.0625 to 2, weight_decay 0." in str(planned)


@pytest.mark.parametrize(
    ("rates", "match"),
    [
        ({}, "expected a dict"),
        ({"*": -1.0}, r"Rates\.params: '\*': lr: expected a number of at least 0, got -1.0"),
        ({"*": {"lr": "fast"}}, r"lr: expected a number"),
        ({"!head.*": 1.0}, "the first pattern that matches counts"),
        ({"haed.*": 1.0}, r"policy\.rates\.params: .*'haed\.\*' matches nothing; did you mean 'head"),
        ({"*": 1.0, "head.*": 2.0}, r"head\.\*: a pattern before it has all that it matches"),
        ({"*": {"weight_dcay": 0.1}}, "'weight_dcay'; did you mean 'weight_decay'"),
        ({"*": {"weight_decay": math.nan}}, r"'\*': weight_decay: expected a number of at least 0, got nan"),
        ({"*": {"weight_decay": "x"}}, r"weight_decay: expected a number of at least 0, got 'x'"),
        # 0 / 0 where all gradients were 0
        ({"*": {"eps": 0}}, r"eps: expected a number above 0, got 0"),
        ({"*": {"eps": None}}, r"eps: expected a number above 0, got None"),
        ({"*": {"betas": (2, 0.9)}}, r"betas: expected a number of at least 0 and below 1, got 2"),
        ({"*": {"betas": [0.9]}}, r"'embed\.weight': betas: expected 2 values such as \(0\.9, 0\.999\), got"),
        ({"*": {"maximize": "yes"}}, r"maximize: expected True or False, got 'yes'"),
        ({"*": {"foreach": "yes"}}, r"foreach: expected True or False, got 'yes'"),
        ({"*": {"decoupled_weight_decay": 3}}, r"decoupled_weight_decay: expected True or False, got 3"),
        ({"*": {"lr": None}}, r"lr: expected a number"),
        ({"*": lambda: 1.0}, r"lr: must take the count alone"),
    ],
)
def test_wrong_rates_are_refused(stack, tokens, rates, match: str) -> None:
    optimizer = torch.optim.AdamW(stack.named_parameters())
    with (
        pytest.raises(gp.PolicyError, match=match),
        gp.training(stack, optimizer, {"rates": gp.Rates(rates)}),
    ):
        stack(tokens)


@pytest.mark.parametrize("value", [math.nan, -1, "a", None, 1j], ids=repr)
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_what_a_schedule_returns_is_checked_at_every_step(moves, name: str, value: Any) -> None:
    rates = gp.Rates({"*": {name: lambda step: 0.5 if step < 2 else value}})
    with pytest.raises(
        gp.PolicyError, match=rf"policy\.rates: at 2: {name}: expected a number of at least 0"
    ):
        moves([rates])
    assert moves([gp.Rates({"*": lambda step: torch.tensor(0.5)})]) == [0.5] * 6
