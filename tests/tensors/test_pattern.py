"""N of every M, and blocks: what masks of these levels look like."""

import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

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
    ("arguments", "message"),
    [({"level": "4:2"}, "level"), ({"level": "2:4", "density": 0.1}, "'2:4' means 0.5, got 0.1")],
)
def test_what_is_no_pattern_is_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.Random(**arguments)


def test_a_tensor_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"level 2:4: 'bias' of shape \(8,\) is no matrix"):
        gp.masks.Random(level="2:4").setup({"bias": torch.zeros(8)}, seed=0)


def followed(policy: gp.Freeze, steps: int, resume: int | None = None):
    """Masks and weights after every step of a training with AdamW, which may go on from a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), []
    context = gp.training(model, optimizer, [copy.deepcopy(policy)])
    masked = context.__enter__()
    for step in range(steps):
        if step == resume:
            file = io.BytesIO()
            torch.save((model.state_dict(), masked.state_dict()), file)
            context.__exit__(None, None, None)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
            context = gp.training(model, torch.optim.AdamW(model.parameters()), [copy.deepcopy(policy)])
            masked = context.__enter__()
            file.seek(0)
            weights, state = torch.load(file)
            model.load_state_dict(weights)
            masked.load_state_dict(state)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        masked.step()
        masked.zero_grad()
        found.append([(masked.get_mask(m.weight), m.weight.detach().clone()) for m in (model[0], model[2])])
    context.__exit__(None, None, None)
    return found


def holds(level: str, values: torch.Tensor) -> bool:
    """Whether torch's sparse matrix of it holds all of it; for blocks, whether they are whole."""
    if level != "2:4":
        return pattern_of(level).holds(values != 0)
    # Rows and columns as the hardware's format wants them; this is what to_sparse_semi_structured computes.
    padded = torch.zeros(32, 32, dtype=torch.half)
    padded[: len(values), : values.shape[1]] = values.half()
    again = sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(padded))
    return torch.equal(again, padded)


def fixed(density: float | None, level: str) -> gp.masks.Fixed:
    tile = gp.masks.RandomMask(0, 0, "", 0.5, level).materialize((8, 16))
    return gp.masks.Fixed({"0.weight": tile.repeat(4, 1), "2.weight": tile.repeat(1, 2)}, level=level)


@pytest.mark.parametrize(("level", "density"), [("2:4", None), ("4x8", 0.3)])
@pytest.mark.parametrize(
    "source",
    [
        lambda density, level: gp.masks.Random(density, level=level, every=3),
        lambda density, level: gp.masks.TopK(density, level=level, by="snip", every=3, before="freeze"),
        fixed,
        lambda density, level: gp.masks.PruneAndGrow(density, level=level, every=3, stop=9),
        lambda density, level: gp.masks.PruneAndGrow(density, level=level, grow="random", every=3),
    ],
)
def test_masks_follow_the_pattern_after_every_step_and_resume(
    source: Callable, level: str, density: float | None
) -> None:
    made = source(density, level)
    sparse = isinstance(made, gp.masks.PruneAndGrow)
    policy = gp.Freeze(made, params="*.weight", frozen_state="zero")
    whole = followed(policy, 12)
    for step, resumed in zip(whole, followed(policy, 12, resume=5), strict=True):
        for (mask, weight), (its_mask, its_weight) in zip(step, resumed, strict=True):
            assert torch.equal(mask, its_mask)
            assert torch.equal(weight, its_weight)
            if mask.numel() > 1:
                assert holds(level, mask.expand(weight.shape))
            if sparse:
                assert level != "2:4" or holds(level, weight)
                assert not weight[~mask.expand(weight.shape)].any()
    changes = sum(not torch.equal(a[0][0], b[0][0]) for a, b in itertools.pairwise(whole))
    assert bool(changes) != (source is fixed)


def test_pruning_and_growing_by_pattern_keeps_what_is_greatest_and_grows_in_the_same_four() -> None:
    weight, gradient = torch.randn(4, 8), torch.randn(4, 8)
    source = gp.masks.PruneAndGrow(level="2:4", fraction=0.5, every=1, anneal="constant")
    source.setup({"w": weight}, seed=0)
    first = source.masks(0, 0)["w"]
    source.apply()
    source.observe({"w": gradient})
    second = source.masks(1, 0)["w"]
    kept = first & (weight.abs() >= weight.abs()[first].sort().values[8])
    for place in range(8):
        four = slice(4 * place, 4 * place + 4)
        own, free = (
            kept.flatten()[four],
            gradient.flatten()[four].abs().masked_fill(kept.flatten()[four], -1.0),
        )
        grown = torch.zeros(4, dtype=torch.bool)
        grown[free.topk(2 - int(own.sum())).indices] = True
        assert torch.equal(second.flatten()[four], own | grown)


def test_a_fixed_mask_that_is_not_of_the_pattern_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"Fixed.level: the mask of 'w' is not 2:4 everywhere"):
        gp.masks.Fixed(torch.ones(4, 8, dtype=torch.bool), level="2:4").setup({"w": torch.ones(4, 8)}, seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_takes_weights_that_were_trained_by_the_pattern() -> None:
    weight = torch.randn(64, 64, dtype=torch.half, device="cuda")
    source = gp.masks.PruneAndGrow(level="2:4")
    source.setup({"w": weight}, seed=0)
    source.apply()
    sparse = torch.sparse.to_sparse_semi_structured(weight)
    assert torch.equal(sparse.to_dense(), weight)
