"""Random masks: seeded, and changed by the timetable."""

import copy

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.freezing import Freezer
from gradpolicy.tensors.seeded_mask import RandomMask


def test_masks_are_seeded_by_seed_step_and_name(prepared) -> None:
    masks = prepared(gp.masks.Random(density=0.3, every=10, level="row"), seed=4).masks(27, 0)
    assert masks["head.weight"] == RandomMask(4, 20, "head.weight", 0.3, "row")


def test_masks_hold_until_the_next_change(prepared) -> None:
    source = prepared(gp.masks.Random(density=0.5, every=4))
    drawn = [source.masks(step, 0) for step in range(12)]
    assert all((drawn[step] == drawn[step - 1]) == (step % 4 != 0) for step in range(1, 12))


def test_two_ranks_and_a_resumed_run_agree(prepared) -> None:
    ranks = [prepared(gp.masks.Random(density=0.5, every=3)) for _ in range(2)]
    for step in range(7):
        ranks[0].masks(step, 0)
    assert ranks[0].masks(7, 0) == ranks[1].masks(7, 0)


def test_the_density_follows_its_schedule(prepared) -> None:
    source = prepared(gp.masks.Random(density=gp.masks.Linear(1.0, 0.0, steps=8), every=2))
    given = [source.masks(step, 0)["head.bias"] for step in (0, 2, 5, 8)]
    densities = [mask if isinstance(mask, bool) else mask.density for mask in given]
    assert densities == [True, 0.75, 0.5, False]


def test_rescaling_keeps_the_expected_gradient(prepared) -> None:
    """Child-Tuning_F: the gradient is multiplied by mask / p."""
    source = prepared(gp.masks.Random(density=0.25, rescale=True))
    assert source.gradient_scale(3, 0) == dict.fromkeys(source.parameters, 4.0)
    assert prepared(gp.masks.Random(density=0.25)).gradient_scale(3, 0) == {}
    gradient = torch.ones(200_000)
    mask = RandomMask(0, 0, "w", 0.25).materialize((200_000,))
    assert (torch.where(mask, gradient, 0) * 4.0).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("level", ["entry", "row", "tensor"])
def test_sgd_takes_the_steps_of_child_tuning_f(stack, tokens, level: str) -> None:
    """Its published code: the gradient times a drawn mask, divided by p, then the optimizer as ever."""
    peer = copy.deepcopy(stack)
    source = gp.masks.Random(0.5, level=level, rescale=True)
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(stack.parameters(), lr=0.1))
    freezer = Freezer(stack, optimizer, {"child": gp.Freeze(source)}, seed=5)
    by_hand = torch.optim.SGD(peer.parameters(), lr=0.1)
    for step in range(6):
        freezer.begin_step(step)
        for model, steps in ((stack, optimizer), (peer, by_hand)):
            steps.zero_grad()
            model(tokens).square().mean().backward()
        freezer.observe()
        for name, parameter in peer.named_parameters():
            drawn = source.masks(step, 0)[name].materialize(parameter.shape)
            parameter.grad *= drawn.float() / 0.5
        optimizer.step()
        by_hand.step()
        freezer.finish_step()
    for ours, theirs in zip(stack.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"density": 2}, "between 0 and 1"), ({"level": "column"}, "level"), ({"unit": "batch"}, "unit")],
)
def test_wrong_arguments_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.Random(**arguments)
