"""N of every M, and blocks: what masks of these levels look like."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.tensors.pattern import pattern_of


@pytest.mark.parametrize("source", [gp.masks.Random(level="2:4"), gp.masks.TopK(level="2:4", by="magnitude")])
def test_two_of_every_four_entries_of_a_row_are_active(source) -> None:
    weight = torch.randn(6, 4, 3, 2)
    source.setup({"w": weight}, seed=0)
    mask = source.masks(0, 0)["w"]
    mask = mask if isinstance(mask, torch.Tensor) else mask.materialize(weight.shape)
    assert (mask.reshape(-1, 4).sum(1) == 2).all()
    if isinstance(source, gp.masks.TopK):
        groups = weight.abs().reshape(-1, 4)
        assert (groups[mask.reshape(-1, 4)].reshape(-1, 2).min(1).values >= groups.median(1).values).all()


@pytest.mark.parametrize(
    "source", [gp.masks.Random(0.4, level="2x3"), gp.masks.TopK(0.4, level="2x3", by="weight")]
)
def test_blocks_are_active_as_wholes(source) -> None:
    weight = torch.randn(8, 12)
    source.setup({"w": weight}, seed=0)
    mask = source.masks(0, 0)["w"]
    mask = mask if isinstance(mask, torch.Tensor) else mask.materialize(weight.shape)
    assert pattern_of("2x3").holds(mask)
    assert 0 < mask.sum() < mask.numel()


@pytest.mark.parametrize("level", ["2:4", "2x4"])
def test_a_part_of_the_rows_can_be_drawn_by_itself(level: str) -> None:
    mask = gp.masks.RandomMask(0, 3, "w", 0.5, level)
    whole = mask.materialize((10, 8))
    for start in range(10):
        assert torch.equal(mask.materialize((10, 8), start=start, stop=start + 3), whole[start : start + 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"level": "4:2"}, "level"), ({"level": "2:4", "density": 0.1}, "'2:4' means 0.5, got 0.1")],
)
def test_what_is_no_pattern_is_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.Random(**arguments)


def test_a_tensor_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"level 2:4: 'bias' of shape \(8,\) is no matrix"):
        gp.masks.Random(level="2:4").setup({"bias": torch.zeros(8)}, seed=0)
