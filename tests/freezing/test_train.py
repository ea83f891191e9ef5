"""``Train``: what it matches trains, and nothing else."""

import copy
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

import gradpolicy as gp


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for x in torch.randn(count, 8, 3, generator=torch.Generator().manual_seed(1)):
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def moved(policies, count: int = 3) -> dict[str, torch.Tensor]:
    """Train, and return which entries of each parameter have changed."""
    net = model()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    plain = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    with gp.training(net, plain, policies, seed=0) as optimizer:
        steps(net, optimizer, count)
    return {name: parameter.detach() != before[name] for name, parameter in net.named_parameters()}


ROWS = torch.tensor([True, False, True]).reshape(3, 1).expand(3, 4)


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([gp.Train(params=["*.bias", "4.*"])], {"0.bias": 1, "2.bias": 1, "4.*": 1}),
        ([gp.Train(gp.masks.Rows([0, 2]), params="2.weight")], {"2.weight": ROWS}),
        ([gp.Train(params="0.*"), gp.Train(params="4.*")], {"0.*": 1, "4.*": 1}),
        (
            [gp.Train(gp.masks.Rows("0"), params="2.weight"), gp.Train(gp.masks.Rows("2"), params="2.*")],
            {"2.weight": ROWS, "2.bias": torch.tensor([False, False, True])},
        ),
        (
            [gp.Train(params="2.*"), gp.Freeze(gp.masks.Rows([0, 2]), params="[02].weight")],
            {"2.weight": ROWS, "2.bias": 1},
        ),
        ([gp.Train(params=["0.*", "2.*"]), gp.Freeze(params="0.*")], {"2.*": 1}),
        ([gp.Freeze(params=["*", "!4.*"])], {"4.*": 1}),
        ([gp.Train(params="0.*", when=gp.When(start=100))], {"*": 1}),
        ([gp.Train(params="0.*", when=gp.When(start=100)), gp.Train(params="4.*")], {"4.*": 1}),
        ([gp.Train(gp.masks.Gradual(initial=1, every=100, unit="step"), params=["0.*", "2.*"])], {"2.*": 1}),
    ],
    ids=str,
)
def test_only_what_is_matched_moves(policies, expected):
    found = moved(policies)
    for name, own in found.items():
        wanted = next((mask for glob, mask in expected.items() if fnmatchcase(name, glob)), False)
        assert own.equal(torch.as_tensor(wanted).bool().expand(own.shape)), name


def test_the_other_state_is_dropped_too():
    net = model()
    plain = torch.optim.AdamW(net.parameters(), lr=0.1)
    with gp.training(net, plain, [gp.Train(params="4.*", frozen_state="drop")]) as optimizer:
        steps(net, optimizer)
        held = {p: sum(t.numel() for t in s.values() if t.ndim) for p, s in optimizer.state.items()}
    assert sum(held.values()) == 2 * sum(p.numel() for p in net[4].parameters())


def test_options_are_those_of_policies_that_match():
    policies = {
        "head": gp.Train(params="4.*"),
        "trunk": gp.Train(params="0.*", frozen_state="drop"),
        "less": gp.Freeze(gp.masks.Random(0.5), params="0.*", frozen_state="zero"),
    }
    with pytest.raises(
        gp.PolicyError, match=r"0.weight': policy.trunk wants .*='drop', policy.less .*='zero'"
    ):
        moved(policies)
    policies["trunk"] = gp.Train(params="0.*", frozen_state="zero")
    with pytest.raises(
        gp.PolicyError, match=r"2.weight': policy.head wants .*='keep', policy.trunk .*='zero'"
    ):
        moved(policies)


def test_a_resumed_run_ends_with_the_same_bits():
    policies = [
        gp.Train(gp.masks.Random(0.5, every=2), params="0.*", frozen_state="zero"),
        gp.Train(params="4.*", frozen_state="zero", when=gp.When(start=3)),
    ]
    through, resumed = model(), model()
    states = {}
    for net, cuts in ((through, [8]), (resumed, [5, 3])):
        for count in cuts:
            plain = torch.optim.AdamW(net.parameters(), lr=0.1)
            if count == 3:
                plain.load_state_dict(states["saved"])
            with gp.training(net, plain, copy.deepcopy(policies), seed=3) as optimizer:
                for _ in range(count):
                    steps(net, optimizer, 1)
                states["saved"] = optimizer.state_dict()
    assert all(p.equal(q) for p, q in zip(through.parameters(), resumed.parameters(), strict=True))
    assert not through[0].weight.equal(model()[0].weight)


@pytest.mark.parametrize("policies", [[gp.Freeze()], [gp.Train(params="0.*"), gp.Freeze(params="0.*")]])
def test_nothing_that_trains_is_an_error(policies):
    with pytest.raises(gp.PolicyError, match="0 of 39 entries train"):
        moved(policies)
    with pytest.raises(gp.PolicyError, match="0 of 39 entries train"):
        gp.plan(model(), policies, lambda net: net(torch.ones(2, 3)).sum())


def test_buffers_of_what_another_one_trains_move():
    net = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
    )
    policies = [gp.Train(params="4.*", buffers="eval"), gp.Train(params=["2.*", "3.*"], buffers="eval")]
    with gp.training(net, torch.optim.SGD(net.parameters(), lr=0.1), policies) as optimizer:
        steps(net, optimizer)
        assert (net[1].training, net[3].training) == (False, True)
    assert (int(net[1].num_batches_tracked), int(net[3].num_batches_tracked)) == (0, 3)
