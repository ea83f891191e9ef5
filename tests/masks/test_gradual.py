"""ULMFiT: one more layer group per epoch, from the top."""

import pytest

import gradpolicy as gp
from gradpolicy.errors import PolicyError

GROUPS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def thawed(source, step: int, epoch: int) -> list[str]:
    masks = source.masks(step, epoch)
    return [group for group in GROUPS if all(mask for name, mask in masks.items() if name.startswith(group))]


def test_each_epoch_thaws_one_more_group_from_the_top(prepared) -> None:
    source = prepared(gp.masks.Gradual())
    for epoch in range(8):
        assert thawed(source, 1000, epoch) == GROUPS[-(epoch + 1) :]


def test_start_pace_and_beginning_can_be_set(prepared) -> None:
    source = prepared(gp.masks.Gradual(2, every=10, unit="step", start=5))
    counts = [len(thawed(source, step, 0)) for step in (0, 5, 14, 15, 24, 25, 35, 45, 1000)]
    assert counts == [2, 2, 2, 3, 3, 4, 5, 6, 6]


def test_groups_may_be_given(prepared) -> None:
    source = prepared(gp.masks.Gradual(groups=["embed.*", "blocks.*", "head.*"]))
    assert [len(thawed(source, 0, epoch)) for epoch in range(4)] == [1, 5, 6, 6]


def test_groups_must_hold_every_parameter(prepared) -> None:
    with pytest.raises(PolicyError, match=r"'embed\.weight' must be in one group, not 0"):
        prepared(gp.masks.Gradual(groups=["blocks.*", "head.*"]))
