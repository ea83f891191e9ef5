"""Optimizers: several as one, with the bits that each gives alone."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy

import gradpolicy as gp
from gradpolicy import PolicyError

ENTRIES: list[dict[str, Any]] = [
    {"params": "blocks.*.weight", "ndim": 2, "optimizer": torch.optim.SGD, "lr": 0.02, "momentum": 0.9},
    {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1},
]


def joined(model: nn.Module) -> gp.Optimizers:
    return gp.Optimizers(model, ENTRIES)


def by_hand(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    first = [named.pop(name) for name in list(named) if name.startswith("blocks.") and named[name].ndim == 2]
    sgd = torch.optim.SGD(first, lr=0.02, momentum=0.9)
    return [sgd, torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.1)]


def train(model: nn.Module, optimizers: Any, tokens: Tensor, steps: int = 4) -> None:
    for _ in range(steps):
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 3).backward()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
            each.zero_grad()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.parameters(), second.parameters()))


def test_one_scheduler_sets_all_rates(stack, tokens) -> None:
    optimizer, peer = joined(stack), copy.deepcopy(stack)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    alone = by_hand(peer)
    others = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 6) for each in alone]
    for _ in range(4):
        train(stack, optimizer, tokens, 1)
        scheduler.step()
        train(peer, alone, tokens, 1)
        for each in others:
            each.step()
    assert equal(stack, peer)


def test_a_closure_runs_once(stack, tokens) -> None:
    optimizer, calls = joined(stack), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = stack(tokens).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(calls) == 1


FREEZE: dict[str, Callable[[], Any]] = {
    "none": dict,
    "entries": lambda: {"half": gp.Freeze(gp.masks.Random(0.5, every=2), frozen_state="drop")},
    "rows": lambda: {"some": gp.Freeze(gp.masks.Rows([0, 2]), params="blocks.*.weight")},
    "layers": lambda: {"in turn": gp.Freeze(gp.masks.Layerwise(active=2, every=1), params="blocks.*")},
    "rates": lambda: {"slow": gp.Rates({"blocks.*": gp.LayerDecay(0.5), "*.bias": {"weight_decay": 0.0}})},
}


@pytest.mark.supports("several optimizers", loop="plain")
@pytest.mark.parametrize("policies", FREEZE)
def test_policies_on_it_are_those_on_each(stack, tokens, policies: str) -> None:
    peer = copy.deepcopy(stack)
    with gp.training(stack, joined(stack), FREEZE[policies]()) as optimizer:
        train(stack, optimizer, tokens)
    with gp.training(peer, by_hand(peer), FREEZE[policies]()) as optimizers:
        train(peer, optimizers, tokens)
    assert equal(stack, peer)


@pytest.mark.parametrize("policies", FREEZE)
def test_it_resumes_bit_for_bit(stack, tokens, policies: str) -> None:
    whole = copy.deepcopy(stack)
    with gp.training(whole, joined(whole), FREEZE[policies]()) as optimizer:
        train(whole, optimizer, tokens, 5)
    with gp.training(stack, joined(stack), FREEZE[policies]()) as optimizer:
        train(stack, optimizer, tokens, 3)
        weights, state = pickle.loads(pickle.dumps((stack.state_dict(), optimizer.state_dict())))
    other = copy.deepcopy(stack)
    other.load_state_dict(weights)
    with gp.training(other, joined(other), FREEZE[policies]()) as optimizer:
        optimizer.load_state_dict(state)
        train(other, optimizer, tokens, 2)
    assert equal(other, whole)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, gp.MaskedOptimizer], ids=["plain", "masked"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_by_itself(stack, tokens, how, wrap) -> None:
    optimizer = wrap(joined(stack))
    train(stack, optimizer, tokens, 2)
    other, copied = how((stack, optimizer))
    train(stack, optimizer, tokens, 2)
    train(other, copied, tokens, 2)
    assert equal(stack, other)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, gp.MaskedOptimizer], ids=["plain", "masked"])
def test_distributed_checkpoints_ask_for_its_state_before_the_first_step(stack, tokens, wrap) -> None:
    whole, optimizer = copy.deepcopy(stack), wrap(joined(stack))
    train(whole, reference := wrap(joined(whole)), tokens, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(whole, reference))
    stack.load_state_dict(whole.state_dict())
    assert get_optimizer_state_dict(stack, optimizer)["state"].keys() == saved["state"].keys()
    set_optimizer_state_dict(stack, optimizer, saved)
    train(stack, optimizer, tokens, 2)
    train(whole, reference, tokens, 2)
    assert equal(stack, whole)


@pytest.mark.supports("several optimizers", loop="lightning")
def test_lightning_trains_and_resumes_with_it(two_layers, loader, make_trainer, tmp_path):
    def configure_optimizers(module: Any) -> gp.Optimizers:
        entries = [
            {"params": "trunk.*", "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
            {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.05},
        ]
        return gp.Optimizers(module, entries)

    kind = type("Two", (type(two_layers),), {"configure_optimizers": configure_optimizers})

    def fit(module: Any, epochs: int, **settings: Any) -> Any:
        policies = gp.GradientPolicies({"half": gp.Freeze(gp.masks.Random(0.5, every=2))})
        trainer = make_trainer(max_epochs=epochs, callbacks=[policies])
        trainer.fit(module, loader, **settings)
        return trainer

    torch.manual_seed(1)
    whole = kind()
    first = copy.deepcopy(whole)
    fit(whole, 2)
    fit(first, 1).save_checkpoint(tmp_path / "one.ckpt")
    fit(resumed := kind(), 2, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert equal(resumed, whole)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        (ENTRIES[:1], r"no entry has embed\.weight, blocks\.0\.bias, .*; end with one for '\*'"),
        ([*ENTRIES, ENTRIES[1]], r"Optimizers\[2\]: no parameter that '\*' matches is left for it"),
        ([{**ENTRIES[0], "params": "blcks.*"}], r"Optimizers\[0\]: .*did you mean 'blocks"),
        ([{**ENTRIES[1], "lrr": 0.1}], r"Optimizers\[0\]: .*lrr"),
        ([{"params": "*"}], "needs params, globs, and optimizer"),
        ([{"params": "*", "optimizer": torch.optim.LBFGS}], "takes no closure, got LBFGS"),
        ([], "no entry has"),
        (None, "expected a list with a dict an optimizer, got None"),
        ([3], "expected a list with a dict an optimizer, got 3"),
    ],
)
def test_wrong_entries_are_refused(stack, entries, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        gp.Optimizers(stack, entries)


def test_it_needs_names_and_takes_no_further_group(stack) -> None:
    wrong: Any
    for wrong in (stack.parameters(), None, 3, [("a", 3)]):
        with pytest.raises(PolicyError, match=r"needs the model, or model\.named_parameters\(\)"):
            gp.Optimizers(wrong, ENTRIES)
    optimizer = gp.Optimizers(stack.named_parameters(), ENTRIES)
    with pytest.raises(PolicyError, match="takes no further param group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
