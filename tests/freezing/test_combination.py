"""Several policies on one parameter, and what each optimizer is told."""

import torch

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.tensors.seeded import RandomMask
from tests.freezing.conftest import FakeOptimizer, freezer_of


def test_masks_with_the_same_options_are_set_in_one_call(stack) -> None:
    optimizer, blocks = FakeOptimizer(stack.parameters()), list(stack.blocks.parameters())
    kept = gp.Freeze(gp.masks.Random(density=0.5), params="blocks.*")
    zeroed = gp.Freeze(gp.masks.Random(density=0.5), params="!blocks.*", frozen_state="zero")
    Freezer(stack, [optimizer], {"blocks": kept, "others": zeroed}).begin_step(0)
    assert sorted(optimizer.calls) == sorted([len(blocks), len(list(stack.parameters())) - len(blocks)])
    assert {optimizer.settings[parameter]["frozen_state"] for parameter in blocks} == {"keep"}


def test_the_optimizer_gets_seeded_masks_tensors_and_none(stack) -> None:
    optimizer = FakeOptimizer(stack.parameters())
    rows = torch.tensor([[True], [False], [True]])
    policies = {
        "random": gp.Freeze(gp.masks.Random(density=0.5, level="row"), params="embed.*"),
        "rows": gp.Freeze(gp.masks.Fixed({"head.weight": rows}), params="head.weight"),
        "none": gp.Freeze(gp.masks.Fixed(True), params="head.bias"),
        "all": gp.Freeze(gp.masks.Fixed(), params="blocks.0.*", frozen_state="drop"),
    }
    Freezer(stack, [optimizer], policies, seed=3).begin_step(5)
    assert optimizer.masks[stack.embed.weight] == RandomMask(3, 5, "embed.weight", 0.5, "row")
    assert optimizer.masks[stack.head.weight] is rows
    assert optimizer.masks[stack.head.bias] is None
    assert optimizer.masks[stack.blocks[0].weight] is False
    assert optimizer.settings[stack.blocks[0].weight] == {"frozen_state": "drop", "bias_correction": "entry"}
    assert stack.blocks[1].weight not in optimizer.masks


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


def test_every_optimizer_of_a_shared_parameter_gets_its_mask(stack) -> None:
    shared, *_ = stack.parameters()
    optimizers = [FakeOptimizer([shared]), FakeOptimizer(stack.parameters())]
    Freezer(stack, optimizers, {"all": gp.Freeze(gp.masks.Random(0.5))}, seed=0).begin_step(0)
    one, other = (optimizer.masks[shared] for optimizer in optimizers)
    assert torch.equal(one.materialize(shared.shape), other.materialize(shared.shape))
