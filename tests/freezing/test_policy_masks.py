"""A policy holds the masks of the moment at which its source was asked."""

from collections.abc import Mapping

import pytest
import torch

import gradpolicy as gp
from gradpolicy.freezing import Freezer


class Rewriting(gp.masks.MaskSource):
    """Trains one row after the other, by a tensor that it goes on writing to."""

    def prepare(self) -> None:
        self.mask = torch.zeros(4, 1, dtype=torch.bool)

    def masks(self, step: int, epoch: int) -> Mapping[str, torch.Tensor]:
        self.mask[:] = False
        self.mask[self.period(step, epoch) % 4] = True
        return {"blocks.0.weight": self.mask}

    def scribble(self) -> None:
        self.mask[:] = True


class Repeating(Rewriting):
    repeats_masks = True


def freezer_of(stack, source) -> tuple[gp.MaskedOptimizer, Freezer]:
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(stack.parameters(), lr=0.1))
    return optimizer, Freezer(stack, [optimizer], {"rows": gp.Freeze(source, params="blocks.0.weight")})


@pytest.mark.parametrize("kind", [Rewriting, Repeating])
def test_a_mask_written_anew_in_place_is_a_new_mask(stack, kind: type[Rewriting]) -> None:
    optimizer, freezer = freezer_of(stack, kind())
    for step in range(6):
        freezer.begin_step(step)
        row = torch.arange(4)[:, None] == step % 4
        assert torch.equal(freezer.mask_of("blocks.0.weight"), row)
        assert torch.equal(optimizer.get_mask(stack.blocks[0].weight).expand(4, 4), row.expand(4, 4))


def test_what_is_written_between_changes_is_not_yet_in_force_nor_saved(stack) -> None:
    source = Rewriting(every=3)
    _, freezer = freezer_of(stack, source)
    freezer.begin_step(0)
    source.scribble()
    freezer.begin_step(1)
    row = torch.arange(4)[:, None] == 0
    assert torch.equal(freezer.mask_of("blocks.0.weight"), row)
    assert torch.equal(freezer.state_dict()["masks"]["rows"]["masks"]["blocks.0.weight"], row)


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_given_again_as_it_was_changes_nothing(stack, inference: bool) -> None:
    with torch.inference_mode(inference):
        mask = torch.arange(4)[:, None] == 2
    _, freezer = freezer_of(stack, lambda name, parameter, step: mask)
    held = []
    for step in range(3):
        freezer.begin_step(step)
        held.append(freezer.mask_of("blocks.0.weight"))
        assert torch.equal(held[-1], mask)
    # Nobody counts what is written to a tensor of inference mode.
    assert inference or held[0] is held[1] is held[2]
