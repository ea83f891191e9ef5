"""Several policies on one parameter, and several optimizers."""

from contextlib import nullcontext

import pytest
import torch

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.tensors.seeded import RandomMask
from tests.freezing.conftest import FakeOptimizer, freezer_of


def test_several_policies_mean_the_intersection(stack) -> None:
    mask = torch.rand(4, 4) < 0.5
    policies = {
        "layers": gp.Freeze(gp.masks.Layerwise(active=2, every=1)),
        "entries": gp.Freeze(gp.masks.Fixed(mask), params="blocks.*.weight"),
        "random": gp.Freeze(gp.masks.Random(density=0.5, seed=1), params="blocks.*.weight"),
    }
    optimizer, freezer = freezer_of(stack, policies)
    for step in range(4):
        freezer.begin_step(step)
        layers = policies["layers"].mask.masks(step, 0)
        for i in range(4):
            name = f"blocks.{i}.weight"
            drawn = RandomMask(1, step, name, 0.5).materialize((4, 4))
            together = mask & drawn & layers[name]
            assert torch.equal(optimizer.get_mask(stack.blocks[i].weight).expand(4, 4), together)


BEST = {"params": "*", "until": {"metric": "loss"}, "best": True}


@pytest.mark.parametrize(
    ("other", "conflicts"),
    [
        (gp.Freeze(gp.masks.Random(0.5, every=3)), True),
        (gp.Freeze(False, when=gp.When(start=2)), True),
        (gp.Freeze(gp.masks.TopK(0.5, every=None)), True),
        (gp.Freeze(gp.masks.Random(0.5, every=None)), False),
        (gp.Freeze(params="embed.*"), False),
        (gp.Train(params="head.*"), False),
    ],
)
def test_best_weights_are_not_restored_where_another_policy_freezes_entries_in_turn(stack, other, conflicts):
    policies = {"phases": gp.Freeze(gp.masks.Phases([BEST])), "other": other}
    message = (
        r"'.*': policy.phases restores the best weights .* policy.other has frozen since; leave best out"
    )
    expected = pytest.raises(gp.PolicyError, match=message) if conflicts else nullcontext()
    with expected:
        freezer_of(stack, policies)
    with expected:
        gp.plan(stack, policies, lambda copy: sum(each.sum() for each in copy.parameters()))


def test_every_optimizer_of_a_shared_parameter_gets_its_mask(stack) -> None:
    shared, *_ = stack.parameters()
    optimizers = [FakeOptimizer([shared]), FakeOptimizer(stack.parameters())]
    Freezer(stack, optimizers, {"all": gp.Freeze(gp.masks.Random(0.5))}, seed=0).begin_step(0)
    one, other = (optimizer.masks[shared] for optimizer in optimizers)
    assert torch.equal(one.materialize(shared.shape), other.materialize(shared.shape))
