"""The entries that score highest: each score against its definition, windows, resume."""

import copy

import pytest
import torch
from torch import Tensor

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.selection import highest, kept_count
from tests.freezing.conftest import freezer_of, loss_of


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {"a": torch.randn(5, 4), "b": torch.randn(3, 2, 2), "c": torch.randn(7)}


def gradients_like(parameters: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


def test_change_is_measured_from_the_first_weights(prepared, weights) -> None:
    source = prepared(gp.masks.TopK(0.2, by="change", start=10), weights)
    assert set(source.masks(9, 0).values()) == {True}
    moved = gradients_like(weights, 3)
    for name, weight in weights.items():
        weight += moved[name]
    masks = source.masks(10, 0)
    chosen = torch.cat([moved[name].abs()[masks[name]] for name in weights])
    left = torch.cat([moved[name].abs()[~masks[name]] for name in weights])
    assert chosen.min() > left.max()


def test_what_no_gradient_reaches_comes_behind_negative_scores(prepared) -> None:
    weights = {"idle": torch.ones(4), "used": torch.ones(4)}
    source = prepared(gp.masks.TopK(0.5, by="movement"), weights)
    source.observe({"used": torch.ones(4)})
    masks = source.masks(1, 0)
    assert (masks["idle"].any().item(), masks["used"].all().item()) == (False, True)


def test_tensors_are_chosen_by_their_mean(prepared, weights) -> None:
    source = prepared(gp.masks.TopK(0.5, by="fisher", level="tensor"), weights)
    gradients = gradients_like(weights, 0)
    source.observe(gradients)
    order = sorted(gradients, key=lambda name: gradients[name].pow(2).mean().item())
    assert source.masks(1, 0) == {name: name != order[0] for name in weights}


def test_rows_are_chosen_by_their_mean(prepared, weights) -> None:
    source = prepared(gp.masks.TopK(0.4, by="fisher", level="row"), weights)
    gradients = gradients_like(weights, 0)
    source.observe(gradients)
    masks = source.masks(1, 0)
    means = torch.cat([g.pow(2).reshape(len(g), -1).mean(1) for g in gradients.values()])
    chosen = torch.cat([mask.flatten() for mask in masks.values()])
    assert chosen.sum() == 6
    assert means[chosen].min() > means[~chosen].max()
    assert masks["b"].shape == (3, 1, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["head.weight", "embed.weight"])
def test_a_step_with_a_gradient_that_is_not_finite_does_not_count(stack, tokens, bad, place):
    """Mixed precision skips such a step, also where the gradient is none of the source's."""
    choices = []
    for attempts in ([1, 1, 1], [1, 2, 1]):
        model = copy.deepcopy(stack)
        policy = gp.Freeze(gp.masks.TopK(0.25, window=2), params="head.*")
        optimizer, freezer = freezer_of(model, {"top": policy})
        for step, times in enumerate(attempts):
            for attempt in reversed(range(times)):
                freezer.begin_step(step)
                optimizer.zero_grad()
                loss_of(model, tokens).backward()
                if attempt:
                    model.get_parameter(place).grad[0, 0] = bad
                freezer.observe(optimizer)
            optimizer.step()
        choices.append(freezer.mask_of("head.weight"))
    assert torch.equal(*choices)


def test_a_window_of_one_step_keeps_a_choice_and_no_copy_of_the_gradients(prepared, weights) -> None:
    gradients = gradients_like(weights, 0)
    source, resumed = (prepared(gp.masks.TopK(0.25, by="snip"), weights) for _ in range(2))
    source.observe(gradients)
    state = copy.deepcopy(source.state_dict())
    assert state["sums"] == {}
    resumed.load_state_dict(state)
    scores = {name: (weights[name] * gradients[name]).abs() for name in weights}
    least = torch.cat([score.flatten() for score in scores.values()]).sort().values[-10]
    for each in (source, resumed):
        masks = each.masks(1, 0)
        assert all(torch.equal(masks[name], scores[name] >= least) for name in weights)


@pytest.mark.parametrize(("unit", "window"), [("step", 1), ("step", 3), ("epoch", 1), ("epoch", 2)])
def test_a_window_counts_steps_or_epochs_also_if_the_run_resumes_in_it(
    prepared, unit: str, window: int
) -> None:
    gradients, weights = torch.randn(24, 6), {"w": torch.zeros(6)}
    source, *sources = [
        prepared(gp.masks.TopK(0.5, window=window, every=window, unit=unit), weights) for _ in range(25)
    ]
    steps = window if unit == "step" else 4 * window  # an epoch has four steps
    for step, resumed in enumerate(sources):
        masks = source.masks(step, step // 4)
        if end := step // steps * steps:
            scores = gradients[end - steps : end].sum(0).abs()
            assert torch.equal(masks["w"], scores >= scores.sort().values[3]), step
        if source.gradient_names(step, step // 4):
            source.observe({"w": gradients[step]})
        resumed.load_state_dict(copy.deepcopy(source.state_dict()))
        source = resumed


def test_half_precision_gradients_are_summed_in_float32(prepared) -> None:
    weights = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    source = prepared(gp.masks.TopK(0.4, window=300), weights)
    for _ in range(300):
        source.observe({"w": torch.tensor([1.0, 1.0 + 2**-7, 0.0], dtype=torch.bfloat16)})
    # In bfloat16 both sums would end at 256, and the first of equal scores is chosen.
    assert source.masks(300, 0)["w"].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "fischer"}, "did you mean 'fisher'"),
        ({"within": "layer"}, "within"),
        ({"level": "column"}, "level"),
        ({"before": "wait"}, "before"),
        ({"by": "change"}, "give start above 0"),
        ({"window": 0}, "window"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.TopK(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("by", ["gradient", "weight", "fisher", "movement"])
def test_scores_follow_their_definitions(prepared, by: str, dtype: torch.dtype) -> None:
    """A complex entry scores by both its parts."""
    weight, *gradients = (torch.randn(3, 4, dtype=dtype) for _ in range(4))
    source = prepared(gp.masks.TopK(0.5, by=by, window=3), {"w": weight})
    for gradient in gradients:
        source.observe({"w": gradient})
    both = torch.view_as_real if dtype.is_complex else lambda tensor: tensor.unsqueeze(-1)
    parts, slopes = both(weight), [both(gradient) for gradient in gradients]
    expected = {
        "gradient": sum(slopes).square().sum(-1).sqrt(),
        "weight": parts.square().sum(-1).sqrt(),
        "fisher": sum(slope.square().sum(-1) for slope in slopes),
        "movement": -sum((parts * slope).sum(-1) for slope in slopes),
    }
    assert torch.equal(source.masks(3, 0)["w"], highest(expected[by], kept_count(0.5, 12)))


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_window_longer_than_every_is_warned_of(prepared, weights, unit) -> None:
    with pytest.warns(UserWarning, match=f"window=3 is longer than every=2; each change waits for 3 {unit}s"):
        prepared(gp.masks.TopK(0.5, window=3, every=2, unit=unit), weights)
