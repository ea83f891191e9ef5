"""Under schedule-free optimizers each entry has its own z, age, sum of weights and largest rate."""

import pytest
import schedulefree
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from tests.optim.alone import EachAlone, follow_course

SHAPE = (4, 3)
KINDS = {
    "adamw": (schedulefree.AdamWScheduleFree, {}),
    "adamw warm": (schedulefree.AdamWScheduleFree, {"warmup_steps": 5, "weight_decay": 0.1, "r": 1.5}),
    "adamw betas": (schedulefree.AdamWScheduleFree, {"betas": (0.6, 0.8), "weight_lr_power": 1.0}),
    "adamw single": (schedulefree.AdamWScheduleFree, {"foreach": False, "weight_decay": 0.2}),
    "sgd": (schedulefree.SGDScheduleFree, {}),
    "sgd warm": (schedulefree.SGDScheduleFree, {"warmup_steps": 4, "weight_decay": 0.1, "momentum": 0.7}),
}


def made(name):
    kind, settings = KINDS[name]
    return lambda weights: kind(weights, **{"lr": 0.1, **settings})


@pytest.mark.supports("schedule-free", loop="plain")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("name", KINDS)
def test_each_entry_moves_as_alone_in_training_and_evaluation(device, name, seed):
    make, generator = made(name), torch.Generator(device="cpu").manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))

    def in_training(parameters):
        optimizer = make(parameters)
        optimizer.train()
        return optimizer

    def draw_mask(generator):
        sizes = [SHAPE, (4, 1), (3,), ()][int(torch.randint(4, (), generator=generator, device="cpu"))]
        return (torch.rand(sizes, generator=generator, device="cpu") < 0.6).to(weight.device)

    reference = EachAlone(in_training, weight.detach())
    follow_course(make, reference, weight, draw_mask, generator, 40, 1e-12, evaluates=True)


@pytest.mark.parametrize("name", ["adamw warm", "sgd warm"])
def test_the_first_mask_goes_on_from_what_the_optimizer_has_counted(name):
    make, start = made(name), torch.randn(SHAPE, dtype=torch.float64)
    weight, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    inner, alone = make([weight]), make([plain])
    optimizer = inner
    for step in range(9):
        if step == 3:
            optimizer = gp.MaskedOptimizer(inner)
        if step == 5:
            assert optimizer.active_share() == 1.0
            optimizer.set_mask(weight, torch.ones(SHAPE, dtype=torch.bool))
        optimizer.train()
        alone.train()
        weight.grad = torch.randn(SHAPE, dtype=torch.float64)
        plain.grad = weight.grad.clone()
        optimizer.step()
        alone.step()
    torch.testing.assert_close(weight, plain, atol=1e-12, rtol=1e-12)


def test_a_plain_optimizer_goes_on_with_a_dense_state():
    make = made("adamw warm")
    weight, other = (torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.float64)) for _ in range(2))
    optimizer = gp.MaskedOptimizer(make([weight]), frozen_state="drop")
    optimizer.train()
    optimizer.set_mask(weight, torch.arange(4).view(4, 1) < 2)
    for _ in range(3):
        weight.grad = torch.ones(SHAPE, dtype=torch.float64)
        optimizer.step()
    plain = make([other])
    plain.load_state_dict(optimizer.state_dict(dense=True))
    other.data.copy_(weight.detach())
    optimizer.set_mask(weight, True)
    for parameter, stepped in ((weight, optimizer), (other, plain)):
        parameter.grad = torch.ones(SHAPE, dtype=torch.float64)
        stepped.step()
    torch.testing.assert_close(weight[:2], other[:2], atol=1e-12, rtol=1e-12)
    # A row without updates has z where it is, not at 0.
    assert (other[2:] > 0.8).all()


def test_a_mask_changes_only_in_training():
    weight = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = gp.MaskedOptimizer(made("sgd")([weight]))
    half = torch.arange(4).view(4, 1) < 2
    optimizer.set_mask(weight, half)
    optimizer.train()
    weight.grad = torch.ones(SHAPE)
    optimizer.step()
    optimizer.eval()
    optimizer.set_mask(weight, half)
    with pytest.raises(PolicyError, match="call train\\(\\) of the optimizer before its mask changes"):
        optimizer.set_mask(weight, ~half)
    with pytest.raises(Exception, match="train mode"):
        optimizer.step()
