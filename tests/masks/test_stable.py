"""AutoFreeze: layers whose gradients have settled freeze, from the input on.

Its published program is compared with in test_published_code.py.
"""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.stable import settled_layers


def gradients(norms: list[float]) -> dict[str, torch.Tensor]:
    """Gradients of the weights of the blocks that have these L1 norms."""
    return {f"blocks.{place}.weight": torch.full((4, 4), norm / 16) for place, norm in enumerate(norms)}


def test_settled_layers_are_those_in_front_of_the_first_that_changes() -> None:
    assert settled_layers([1.0, 1.0, 1.0, 1.0], [1.01, 1.02, 2.0, 1.03], 25) == 1
    assert settled_layers([1.0, 1.0, 1.0, 1.0], [1.01, 1.02, 2.0, 1.03], 100) == 2
    assert settled_layers([1.0, 1.0], [1.5, 1.1], 50) == 0


def test_all_but_the_last_layer_and_the_head_may_freeze(prepared) -> None:
    source = prepared(gp.masks.Stable(100, every=1))
    never = {"blocks.3.weight", "blocks.3.bias", "head.weight", "head.bias"}
    assert source.may_freeze() == set(source.parameters) - never


def test_what_is_frozen_needs_no_gradient_and_stays_frozen(prepared) -> None:
    source = prepared(gp.masks.Stable(100, every=1))
    course = []
    for step, norms in enumerate([[1, 1, 1, 1], [1, 5, 1, 1], [9, 5, 1, 1], [9, 9, 9, 1]]):
        source.masks(step, 0)
        wanted = source.gradient_names(step, 0)
        source.observe({name: each for name, each in gradients(norms).items() if name in wanted})
        course.append(source.frozen)
    source.masks(4, 0)
    assert [*course, source.frozen] == [0, 0, 1, 1, 2]
    assert "blocks.0.weight" not in source.gradient_names(5, 0)


def test_nothing_is_asked_for_before_start_or_after_the_last_comparison(prepared) -> None:
    source = prepared(gp.masks.Stable(every=2, start=3, stop=8))
    assert [step for step in range(12) if source.wants_gradients(step, 0)] == [3, 4, 5, 6]


def test_a_window_is_refused_since_the_interval_is_the_window() -> None:
    with pytest.raises(PolicyError, match="Stable: takes no argument 'window'"):
        gp.masks.Stable(window=3)


def test_a_percentile_beyond_100_is_an_error() -> None:
    with pytest.raises(PolicyError, match="between 0 and 100"):
        gp.masks.Stable(101)


@pytest.mark.parametrize(
    ("before", "now", "settled"),
    [
        ([0.5, 0.5], [0.5, 0.1], 1),
        ([0.0, 0.5], [0.5, 0.1], 1),
        ([0.5, 0.5], [0.0, 0.1], 1),
        ([0.5, 0.5], [0.1, 0.5], 0),
    ],
)
def test_a_layer_without_a_gradient_before_or_now_counts_as_unchanged(before, now, settled) -> None:
    assert settled_layers(before, now, 50) == settled
