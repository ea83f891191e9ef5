"""Boxes cover a tensor once, and know which of their entries a mask freezes."""

import pytest
import torch

from gradpolicy.insight.boxes import Grid, frozen_entries, indices_in, narrowed, size_of, turn
from gradpolicy.tensors.mask import as_tensor
from gradpolicy.tensors.seeded_mask import RandomMask

SHAPE = (5, 4, 3)


@pytest.mark.parametrize("most", [1, 3, 7, 12, 25, 60, None])
def test_boxes_cover_a_tensor_once(most):
    grid = Grid.of(SHAPE, most)
    entries = torch.arange(60).view(SHAPE)
    parts = [narrowed(entries, grid.box(number)).flatten() for number in range(grid.count)]
    assert torch.cat(parts).sort().values.tolist() == list(range(60))
    assert all(len(part) == size_of(grid.box(number)) for number, part in enumerate(parts))
    assert max(map(len, parts)) <= (most or 60)


def test_a_scalar_is_one_box_and_an_empty_tensor_none():
    assert Grid.of((), 10).box(0) == ()
    assert Grid.of((0, 4), 10).count == 0


@pytest.mark.parametrize("total", [1, 2, 6, 7, 100, 997])
def test_as_many_turns_as_places_visit_each(total):
    assert {turn(number, total, seed=3) for number in range(5, 5 + total)} == set(range(total))


@pytest.mark.parametrize(
    "mask",
    [
        True,
        False,
        torch.rand(SHAPE) < 0.5,
        torch.tensor([True, False, True, True, False]).view(5, 1, 1),
        torch.tensor([True, False, True]),
        torch.tensor(False),
        RandomMask(0, 1, "w", 0.5),
        RandomMask(0, 1, "w", 0.5, "row"),
        RandomMask(0, 1, "w", 0.5, "tensor"),
    ],
)
@pytest.mark.parametrize("most", [1, 7, 12, None])
def test_frozen_entries_are_those_of_the_whole_mask(mask, most):
    frozen = ~as_tensor(mask, SHAPE).expand(SHAPE)
    parameter = torch.zeros(SHAPE)
    grid = Grid.of(SHAPE, most)
    for number in range(grid.count):
        box = grid.box(number)
        assert torch.equal(frozen_entries(mask, parameter, box), narrowed(frozen, box).flatten())


def test_indices_are_those_in_the_whole_tensor():
    chosen = torch.zeros(SHAPE, dtype=torch.bool)
    chosen[3, 1, 2] = chosen[4, 1, 0] = True
    box = ((3, 5), (1, 2), (0, 3))
    assert indices_in(box, narrowed(chosen, box).flatten(), 5) == [(3, 1, 2), (4, 1, 0)]
    assert indices_in((), torch.tensor([True]), 5) == [()]
