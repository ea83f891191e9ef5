"""Scores: each against its published formula by hand, what a score may ask for, and what a choice costs."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks import scores
from gradpolicy.masks.selection import highest, kept_count
from tests.masks.conftest import cross_entropy


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 8, dtype=torch.double), torch.randint(4, (5,))


@pytest.mark.parametrize("groups", [1, 2])
def test_wanda_takes_the_input_channels_of_a_convolution(groups: int) -> None:
    layer = nn.Conv2d(4, 6, 3, groups=groups, padding=1)
    source = gp.masks.TopK(0.5, by="wanda", level="tensor")
    source.model = layer
    source.setup({"weight": layer.weight}, seed=0)
    x = torch.randn(2, 4, 5, 5)
    layer(x).sum().backward()
    norms = x.square().sum((0, 2, 3)).sqrt().reshape(groups, -1).repeat_interleave(6 // groups, 0)
    torch.testing.assert_close(source._squares["weight"].sqrt()[..., 0, 0], norms)
    source.release()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_wanda_counts_a_recomputed_forward_pass_once(model, batch, use_reentrant: bool) -> None:
    source = gp.masks.TopK(0.5, by="wanda")
    source.model = model
    source.setup({"0.weight": model[0].weight}, seed=0)
    x = batch[0].requires_grad_()
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(source._squares["0.weight"], x.detach().square().sum(0)[None])
    source.release()


@pytest.mark.parametrize("last", [0.5, 1e-2, 1e-5])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 5, 3, 3)])
def test_lift_is_exact_however_small_the_last_singular_value_of_its_rank_is(shape, last: float) -> None:
    rank, columns = 8, math.prod(shape[1:])
    left, right = (torch.linalg.qr(torch.randn(size, 24).double())[0] for size in (shape[0], columns))
    first = torch.logspace(0, math.log10(last), rank)
    values = torch.cat([first, torch.full((24 - rank,), last / 2)]).double()
    weight = ((left * values) @ right.T).float()
    expected = ((left * values)[:, :rank] @ right[:, :rank].T).abs()
    ours = scores.LIFT(rank)(weight.reshape(shape)).double()
    torch.testing.assert_close(ours, expected.reshape(shape), rtol=0, atol=1e-6)
    assert torch.equal(scores.LIFT(24)(weight), weight.abs())


def test_a_function_asks_by_the_names_of_its_arguments(prepared) -> None:
    weight, *gradients = (torch.randn(3, 4) for _ in range(4))
    mask = gp.masks.TopK(0.3, by=lambda weight, gradient: weight.abs() + gradient**2, largest=False, window=3)
    source = prepared(mask, {"w": weight})
    for gradient in gradients:
        source.observe({"w": gradient})
    expected = -(weight.abs() + sum(gradients).square())
    assert torch.equal(source.masks(3, 0)["w"], highest(expected, kept_count(0.3, 12)))


def test_groups_are_ranked_each_by_itself(model) -> None:
    source = gp.masks.TopK(0.25, by="magnitude", within=[["0.*"], ["2.*"]])
    source.setup(dict(model.named_parameters()), seed=0)
    masks = source.masks(0, 0)
    for group in ("0", "2"):
        own = torch.cat([p.abs().flatten() for name, p in model.named_parameters() if name[0] == group])
        ours = torch.cat([mask.flatten() for name, mask in masks.items() if name[0] == group])
        assert torch.equal(ours, highest(own, kept_count(0.25, len(own))))


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (lambda weights: weights, "unknown input 'weights'; did you mean 'weight'"),
        (3, "expected a name or a function"),
    ],
)
def test_what_is_no_score_is_an_error(by, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.TopK(by=by)


def test_scores_of_another_shape_are_an_error(prepared) -> None:
    source = prepared(gp.masks.TopK(by=lambda weight: weight.sum()), {"w": torch.ones(3, 4)})
    with pytest.raises(PolicyError, match="must give a real number for each entry"):
        source.masks(0, 0)


def test_wanda_of_a_bias_is_an_error(model, batch) -> None:
    with pytest.raises(PolicyError, match=r"'0\.bias' is no weight of a Linear or Conv"):
        gp.plan(model, [gp.Freeze(gp.masks.TopK(by="wanda"))], lambda copy: cross_entropy(copy, batch))
