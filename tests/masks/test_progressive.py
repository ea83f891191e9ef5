"""FreezeOut: the layers' shares of the training and their annealed learning rates."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError


def layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.zeros(2) for i in range(count)}


@pytest.mark.parametrize(("total", "first", "curve"), [(100, 0.1, "linear"), (20000, 0.8, "squared")])
def test_a_layer_whose_share_is_over_is_frozen_at_that_very_step(prepared, total, first, curve) -> None:
    """The second layer's share is 0.55 and 0.81, which times the total is a little more than whole."""
    source = prepared(gp.masks.Progressive(total, first=first, curve=curve), layers(3))
    end = round(source.shares["layers.1"] * total)
    for step, trains in ((end - 1, True), (end, False)):
        assert source.masks(step, 0)["layers.1.weight"] is trains
        assert ("layers.1.weight" in source.learning_rate_scale(step, 0)) is trains


def test_embeddings_freeze_first_and_the_head_goes_with_the_last_layer(prepared, trained) -> None:
    source = prepared(gp.masks.Progressive(100, first=0.5, curve="linear"))
    assert list(source.shares) == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    expected = ["blocks.3.weight", "blocks.3.bias", "head.weight", "head.bias"]
    assert trained(source.masks(99, 0)) == expected


def test_the_timetable_shifts_and_coarsens_the_course(prepared) -> None:
    plain = prepared(gp.masks.Progressive(100, first=0.5), layers(3))
    later = prepared(gp.masks.Progressive(100, first=0.5, start=20, every=10, stop=80), layers(3))
    for step in (0, 19, 20, 29, 30, 47, 79, 80, 200):
        passed = max(min(step, 79) - 20, 0) // 10 * 10
        assert later.masks(step, 0) == plain.masks(passed, 0)
        assert later.learning_rate_scale(step, 0) == plain.learning_rate_scale(passed, 0)


def test_annealing_can_be_left_to_others(prepared) -> None:
    assert prepared(gp.masks.Progressive(100, anneal=False)).learning_rate_scale(10, 0) == {}


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(PolicyError, match="did you mean 'cubic'"):
        gp.masks.Progressive(10, curve="cube")
    with pytest.raises(PolicyError, match="above 0"):
        gp.masks.Progressive(10, first=0.0)
    with pytest.raises(PolicyError, match=r"Progressive\.total"):
        gp.masks.Progressive(0)
