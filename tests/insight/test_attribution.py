"""Attributions agree with those of captum, and leave the model as it was."""

import copy
from collections.abc import Callable

import pytest
import torch
from captum.attr import Deconvolution, GuidedBackprop, NoiseTunnel, Saliency
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.insight.attribution import deconv, gradient, guided
from gradpolicy.tasks import QuantizedConvNet

TARGETS = torch.tensor([2, 0, 1])


@pytest.fixture
def model() -> nn.Module:
    first = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.5)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4 * 6 * 6, 3)).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 2, 6, 6)


@pytest.mark.parametrize(("method", "peer"), [(guided, GuidedBackprop), (deconv, Deconvolution)])
def test_relus_give_what_captum_gives(method: Callable, peer: type, model: nn.Module, images: Tensor) -> None:
    expected = peer(model).attribute(images.clone().requires_grad_(), TARGETS).detach()
    torch.testing.assert_close(method(model, images, TARGETS), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected, gradient(model, images, TARGETS))


def test_captums_methods_average_gradients_under_policies(model: nn.Module, images: Tensor) -> None:
    with gp.install(model, [gp.Guided()]):
        smooth = NoiseTunnel(Saliency(model)).attribute(
            images, nt_samples=2, stdevs=0.0, target=TARGETS, abs=False
        )
    torch.testing.assert_close(smooth, guided(model, images, TARGETS))


def test_without_a_target_the_predicted_class_is_attributed(model: nn.Module, images: Tensor) -> None:
    predicted = model(images).argmax(1)
    torch.testing.assert_close(gradient(model, images), gradient(model, images, predicted))
    assert torch.equal(gradient(model, images, 1), gradient(model, images, [1, 1, 1]))


def test_the_model_is_left_as_it_was(model: nn.Module, images: Tensor) -> None:
    model.train()[1].eval()
    model[0].weight.requires_grad_(False)
    model[-1].weight.grad = torch.ones_like(model[-1].weight)

    def flags() -> list[tuple]:
        return [(each.training, len(each._forward_hooks), set(vars(each))) for each in model.modules()]

    before, weights = flags(), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    guided(model, images)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert flags() == before
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert torch.equal(model[-1].weight.grad, torch.ones_like(model[-1].weight))
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(random_state, torch.get_rng_state())
    assert images.grad is None
    assert not images.requires_grad


def test_it_works_within_inference_mode(model: nn.Module, images: Tensor) -> None:
    expected = guided(model, images)
    with torch.inference_mode():
        assert torch.equal(guided(model, images.clone()), expected)


def test_a_quantised_model_is_attributed_through_straight_through_gradients() -> None:
    model, images = QuantizedConvNet(width=4).eval(), torch.rand(2, 1, 8, 8)
    with pytest.warns(UserWarning, match="zero everywhere"):
        assert not gradient(model, images).any()
    assert guided(model, images, policies=[gp.StraightThrough(ops=["round"])]).any(dim=-1).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, images: gradient(model, images.long()), "torch.int64 given, floating point needed"),
        (lambda model, images: deconv(model, images, policies=[gp.Stop(modules="relu3")]), "relu3"),
        (lambda model, images: gradient(model, images, policies=[gp.Stop(modules="7")]), "no gradient"),
    ],
)
def test_wrong_input_is_named(call: Callable, message: str, model: nn.Module, images: Tensor) -> None:
    with pytest.raises(gp.PolicyError, match=message):
        call(model, images)
