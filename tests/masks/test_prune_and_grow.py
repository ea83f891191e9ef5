"""SET and RigL: topology, growth, annealing, zeros outside the mask."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.prune_and_grow import grown_entries, kept_entries
from tests.freezing.conftest import freezer_of, train


def sources(**changes) -> gp.masks.PruneAndGrow:
    arguments = {"density": 0.4, "every": 3, "stop": 12, "fraction": 0.5}
    return gp.masks.PruneAndGrow(**{**arguments, **changes})


def nearest_to_zero(weights: np.ndarray, fraction: float) -> set[int]:
    """What SET's prose removes: of the positive weights the smallest share, of the negative the largest."""
    positive, negative = np.flatnonzero(weights > 0), np.flatnonzero(weights < 0)
    smallest = positive[np.argsort(weights[positive])][: int(fraction * len(positive))]
    largest = negative[np.argsort(-weights[negative])][: int(fraction * len(negative))]
    return {*smallest.tolist(), *largest.tolist()}


def test_set_takes_the_course_of_its_paper_step_by_step(prepared) -> None:
    """Which weights leave, how many come and with what values, over whole runs of scripted updates."""
    weight = nn.Parameter(torch.randn(30, 20) * 0.1)
    deviation = weight.std(correction=0).item()
    source = prepared(sources(grow="random", fraction=0.3, density=0.3), {"w": weight})
    source.apply()
    generator = torch.Generator().manual_seed(1)
    mask, grown_values = source.masks(0, 0)["w"], []
    for step in range(15):
        before = weight.detach().clone().flatten()
        given = source.masks(step, 0)["w"]
        source.apply()
        after = weight.detach().flatten()
        if step % 3 == 0 and 0 < step < 12:
            removed = nearest_to_zero(before.numpy(), 0.3)
            kept = [i for i in mask.flatten().nonzero().flatten().tolist() if i not in removed]
            assert torch.equal(after[kept], before[kept])
            assert given.flatten()[kept].all()
            assert int(given.sum()) == int(mask.sum()) == 180
            fresh = given.flatten().clone()
            fresh[kept] = False
            assert (after[fresh] != before[fresh]).all()
            grown_values.append(after[fresh])
        else:
            assert given is mask
            assert torch.equal(after, before)
        assert not after[~given.flatten()].any()
        mask = given
        with torch.no_grad():
            weight -= 0.01 * torch.randn(30, 20, generator=generator) * given
    values = torch.cat(grown_values)
    assert values.mean().abs() < 4 * deviation / len(values) ** 0.5
    assert values.std().item() == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize(
    ("anneal", "left"),
    [
        ("cosine", lambda passed: (1 + math.cos(math.pi * passed)) / 2),
        ("linear", lambda passed: 1 - passed),
        ("constant", lambda passed: 1.0),
    ],
)
def test_the_exchanged_share_is_annealed(anneal: str, left) -> None:
    source = sources(anneal=anneal, fraction=0.3, start=10, stop=110)
    for count in (10, 35, 60, 110, 500):
        assert source.fraction_at(count) == pytest.approx(0.3 * left(min((count - 10) / 100, 1)))


def test_the_density_may_fall_as_in_gradual_pruning(prepared) -> None:
    """With nothing exchanged this is Zhu and Gupta's magnitude pruning: active entries only leave."""
    density = gp.masks.Cubic(start=1.0, stop=0.1, steps=8)
    falling = sources(density=density, fraction=0.0, every=2, stop=10, grow="random")
    weight = torch.randn(10, 10)
    source, sizes = prepared(falling, {"w": weight}), weight.abs()
    counts, last = [], torch.ones(10, 10, dtype=torch.bool)
    for step in range(0, 12, 2):
        mask = source.masks(step, 0)["w"]
        source.apply()
        counts.append(int(mask.sum()))
        assert not (mask & ~last).any()
        assert all(sizes[mask].min() > left for left in sizes[~mask])
        last = mask
    assert counts == [100 - int(round((1 - density(min(step, 8))) * 100, 6)) for step in range(0, 12, 2)]


@pytest.mark.parametrize(("start", "first"), [(0, 3), (4, 4)])
def test_the_first_exchange_is_at_a_later_start_or_after_the_first_period(prepared, start, first) -> None:
    source = prepared(sources(start=start, fraction=1.0), {"w": torch.randn(8, 8)})
    drawn, changed = source.masks(0, 0)["w"], []
    for step in range(first + 1):
        if not torch.equal(source.masks(step, 0)["w"], drawn):
            changed.append(step)
        source.observe({"w": torch.randn(8, 8)})
    assert changed == [first]


def test_biases_stay_dense(prepared) -> None:
    masks = prepared(sources()).masks(0, 0)
    dense = [name for name, mask in masks.items() if mask is True]
    assert dense == [*[f"blocks.{i}.bias" for i in range(4)], "head.bias"]
    assert int(masks["head.weight"].sum()) == 12 - int(0.6 * 12)


def test_entries_outside_the_mask_are_zero_and_grown_ones_start_there(stack, tokens) -> None:
    source = sources(every=2, window=2, stop=20)
    policy = gp.Freeze(source, params=["blocks.*", "head.*"], frozen_state="zero")
    optimizer, freezer = freezer_of(stack, {"rigl": policy})
    before, exchanged = {}, 0
    for step in range(12):
        freezer.begin_step(step)
        for name, parameter in source.parameters.items():
            mask = optimizer.get_mask(parameter).expand(parameter.shape)
            grown = mask & ~before.get(name, mask)
            assert not parameter[~mask | grown].any()
            assert not optimizer.age(parameter).expand(mask.shape)[grown].any()
            exchanged += int(grown.sum())
            before[name] = mask.clone()
        train(stack, freezer, tokens, range(step, step + 1))
    assert exchanged > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grow": "gradients"}, "did you mean 'gradient'"),
        ({"distribution": "er"}, "did you mean 'erk'"),
        ({"anneal": "cosine", "stop": None}, "needs the count that it ends at"),
        ({"fraction": 2}, r"PruneAndGrow\.fraction"),
        ({"density": 0.5, "every": 0}, "every"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        sources(**arguments)


def test_a_complex_weight_has_no_sign(prepared) -> None:
    weights = {"w": torch.ones(4, 4, dtype=torch.complex64)}
    with pytest.raises(PolicyError, match=r"'w' is complex; it takes grow='gradient'"):
        prepared(gp.masks.PruneAndGrow(grow="random"), weights)
    assert int(prepared(gp.masks.PruneAndGrow(0.25), weights).masks(0, 0)["w"].sum()) == 4


@pytest.mark.parametrize(("density", "active"), [(0, 0), (1e-9, 1), (0.07, 7), (1 - 1e-9, 100), (1, 100)])
def test_a_share_is_rounded_up_to_whole_entries(prepared, density: float, active: int) -> None:
    source = prepared(gp.masks.PruneAndGrow(density), {"w": torch.zeros(10, 10)})
    assert int(source.masks(0, 0)["w"].sum()) == active


def test_an_active_entry_of_weight_zero_stays_ahead_of_inactive_ones() -> None:
    """Where rigl-torch errs: a grown entry that is still zero ties with all inactive ones there."""
    mask = torch.tensor([False, False, True, True, True])
    weight = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0])
    kept = kept_entries(mask, weight, 0.0, 3, by_sign=False)
    gradient = torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0])
    assert torch.equal(kept | grown_entries(kept, gradient, 3), mask)
