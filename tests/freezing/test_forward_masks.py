"""Masks in the forward pass: gradients are dense, whole weights are updated, the rest sees masked ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from tests.fixtures import through_a_file

WIDTH = 32


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)).double()


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def train(model: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def best(weight: Tensor, density: float) -> Tensor:
    kept = weight.abs().flatten().topk(round(density * weight.numel())).indices
    return torch.zeros(weight.numel(), dtype=torch.bool).index_fill(0, kept, True).view_as(weight)


def test_it_is_the_straight_through_estimator_of_masked_weights() -> None:
    """By hand: whole weights, masked anew before each step, with the gradient of the product for all."""
    model, steps, decay = network(), 12, 0.01
    whole = copy.deepcopy(model)
    theirs = adamw(whole)
    for step in range(steps):
        masks = {"0.weight": best(whole[0].weight, 0.25), "2.weight": best(whole[2].weight, 0.25)}
        masked = {name: p.detach() * masks.get(name, True) for name, p in whole.named_parameters()}
        for tensor in masked.values():
            tensor.requires_grad_()
        torch.func.functional_call(whole, masked, (batch(step),)).square().mean().backward()
        for name, p in whole.named_parameters():
            p.grad = masked[name].grad + decay * (~masks.get(name, torch.tensor(True)) * p.detach())
        theirs.step()
    source = gp.masks.TopK(0.25, by="magnitude", within="tensor", every=1)
    policy = gp.ForwardMask(source, params="*.weight", decay=decay)
    with gp.training(model, adamw(model), [policy]) as optimizer:
        train(model, optimizer, range(steps))
        with optimizer.whole_weights():
            torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=1e-12)
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)


@pytest.mark.supports("forward masks", loop="plain")
def test_two_of_four_holds_after_every_step_and_a_resumed_run_has_the_same_bits() -> None:
    source = gp.masks.TopK(level="2:4", by="magnitude", every=3)
    policy = gp.ForwardMask(source, params="*.weight", decay=1e-3)
    model, resumed = network(), network()
    first = copy.deepcopy(model)
    with gp.training(model, adamw(model), [copy.deepcopy(policy)]) as optimizer:
        for step in range(10):
            train(model, optimizer, range(step, step + 1))
            for layer in (model[0], model[2]):
                half = layer.weight.detach().half()
                again = sparse_semi_structured_from_dense_cutlass(half)
                assert torch.equal(sparse_semi_structured_to_dense_cutlass(*again), half)
                assert 0 < half.count_nonzero() <= half.numel() // 2
    with gp.training(first, adamw(first), [copy.deepcopy(policy)]) as optimizer:
        train(first, optimizer, range(4))
        saved = through_a_file((first.state_dict(), optimizer.state_dict()))
    for order in (1, -1):
        weights, state = copy.deepcopy(saved)
        with gp.training(resumed, adamw(resumed), [copy.deepcopy(policy)]) as optimizer:
            loads = (resumed.load_state_dict, weights), (optimizer.load_state_dict, state)
            for load, part in loads[::order]:
                load(part)
            train(resumed, optimizer, range(4, 10))
        assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_what_is_saved_after_training_resumes_with_the_same_bits_and_changes_no_weight() -> None:
    policy = gp.ForwardMask(gp.masks.TopK(0.3, by="magnitude", every=2), params="*.weight")
    model = network()
    stopped = copy.deepcopy(model)
    with gp.training(model, adamw(model), [copy.deepcopy(policy)]) as optimizer:
        train(model, optimizer, range(6))
    with gp.training(stopped, adamw(stopped), [copy.deepcopy(policy)]) as optimizer:
        train(stopped, optimizer, range(3))
    weights, state = copy.deepcopy((stopped.state_dict(), optimizer.state_dict()))
    for parameter in stopped.parameters():
        nn.init.ones_(parameter)
    optimizer.state_dict()
    assert all((parameter == 1).all() for parameter in stopped.parameters())
    stopped.load_state_dict(weights)
    with gp.training(stopped, adamw(stopped), [copy.deepcopy(policy)]) as optimizer:
        optimizer.load_state_dict(state)
        train(stopped, optimizer, range(3, 6))
    assert all(map(torch.equal, stopped.parameters(), model.parameters()))


def test_top_kast_updates_a_wider_set_and_leaves_the_rest_alone() -> None:
    model = network()
    before, every = copy.deepcopy(model), {"every": 1, "stop": 1}
    policies = {
        "forward": gp.ForwardMask(gp.masks.TopK(0.1, by="magnitude", **every), params="*.weight"),
        "backward": gp.Freeze(gp.masks.TopK(0.3, by="magnitude", **every), params="*.weight"),
    }
    seen = {}
    with gp.training(model, adamw(model), policies) as optimizer:
        train(model, optimizer, range(5))
        for name in ("0.weight", "2.weight"):
            weight = model.get_parameter(name)
            updated, seen[name] = optimizer.get_mask(weight), weight != 0
            assert not (seen[name] & ~updated).any()
            with optimizer.whole_weights():
                assert torch.equal(weight[~updated], before.get_parameter(name)[~updated])
                assert not (weight == before.get_parameter(name))[updated].any()
    entries = sum(each.numel() for each in seen.values())
    assert sum(int(each.sum()) for each in seen.values()) == pytest.approx(0.1 * entries, abs=1)


class Tied(nn.Module):
    """An embedding whose weight is the head too, used by a function outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embed(tokens), self.embed.weight)


def test_every_use_of_a_weight_sees_the_mask_and_keys_stay_those_of_the_model() -> None:
    model = Tied()
    keys, mask = list(model.state_dict()), torch.rand(16, 8) < 0.5
    weight = model.embed.weight.detach().clone()
    masked = (weight * mask).requires_grad_()
    tokens = torch.arange(16)
    out = F.linear(F.embedding(tokens, masked), masked)
    out.square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gp.training(model, optimizer, [gp.ForwardMask({"*": mask})]) as optimizer:
        ours = model(tokens)
        ours.square().sum().backward()
        assert torch.equal(ours, out)
        assert torch.equal(model.embed.weight.grad, masked.grad)
        assert list(model.state_dict()) == keys
        optimizer.step()
        assert torch.equal(model.state_dict()["embed.weight"] != 0, mask)
        exported = torch.export.export(copy.deepcopy(model).eval(), (tokens,))
    assert not exported.state_dict["embed.weight"][~mask].any()
    assert not model.embed.weight[~mask].any()


def test_a_source_sees_whole_weights() -> None:
    """A score of w · g would be 0 where the forward pass sees nothing."""
    model = nn.Linear(WIDTH, 8, bias=False).double()
    whole = model.weight.detach().clone()
    policy = gp.ForwardMask(gp.masks.TopK(0.25, by="snip", every=1, window=1))
    mask = torch.ones_like(whole, dtype=torch.bool)
    with gp.training(model, torch.optim.SGD(model.parameters(), lr=1e-3), [policy]) as optimizer:
        for step in range(5):
            out = model(batch(step)).square().sum()
            assert torch.equal(model.weight != 0, mask)
            out.backward()
            gradient = model.weight.grad.clone()
            mask, whole = best(whole * gradient, 0.25), whole - 1e-3 * gradient
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_that_mixed_precision_skips_changes_nothing() -> None:
    model = network().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    policy = gp.ForwardMask(gp.masks.Random(0.5, every=1), params="*.weight", decay=0.1)
    with gp.training(model, adamw(model), [policy]) as optimizer:
        for step in range(3):
            factor = float("inf") if step == 1 else 1.0
            loss = model(batch(step).float()).square().mean() * factor
            seen = [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss).backward()
            with optimizer.whole_weights():
                whole = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                assert all(map(torch.equal, model.parameters(), seen))
                with optimizer.whole_weights():
                    assert all(map(torch.equal, model.parameters(), whole))


def test_whole_weights_come_back_when_the_policy_no_longer_holds() -> None:
    model = network()
    policy = gp.ForwardMask(gp.masks.Random(0.5, every=1), params="*.weight", when={"stop": 2})
    with gp.training(model, adamw(model), [policy]) as optimizer:
        train(model, optimizer, range(2))
        assert (model[0].weight == 0).float().mean() > 0.3
        with optimizer.whole_weights():
            whole = model[0].weight.detach().clone()
        model(batch(2))
        assert torch.equal(model[0].weight, whole)


def test_an_optimizer_that_runs_forward_passes_itself_is_an_error() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with gp.training(model, optimizer, [gp.ForwardMask(gp.masks.Random(0.5))]) as optimizer:
        model(batch(0))
        with pytest.raises(PolicyError, match="LBFGS runs forward passes within its step"):
            optimizer.step(lambda: model(batch(0)).square().mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"decay": -1.0}, "decay: must be a number of at least 0"), ({"params": []}, "names no parameter")],
)
def test_wrong_arguments_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.ForwardMask(gp.masks.Random(0.5), **arguments)


def test_a_plan_says_how_much_the_forward_pass_sees() -> None:
    policies = {"seen": gp.ForwardMask(gp.masks.TopK(0.25, by="magnitude"), params="0.weight")}
    planned = gp.plan(network(), policies, lambda copied: copied(batch(0)).square().mean())
    assert planned.training_entries == planned.entries
    assert "the forward pass sees 25.0% of 2,048 entries, and all train" in planned.rows[0].remarks[0]


def test_each_of_two_optimizers_decays_its_own_weights_once() -> None:
    """Two optimizers move the same as one of all parameters."""
    trained = []
    for split in (1, 2):
        torch.manual_seed(0)
        model = network()
        optimizers = [adamw(part) for part in ([model] if split == 1 else [model[0], model[2]])]
        source = gp.masks.TopK(0.25, by="magnitude", within="tensor", every=2)
        policy = gp.ForwardMask(source, params="*.weight", decay=0.1)
        with gp.training(model, optimizers, [policy]) as wrapped:
            for step in range(6):
                model(batch(step)).square().mean().backward()
                for optimizer in wrapped:
                    optimizer.step()
                    optimizer.zero_grad()
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=0, atol=0)
