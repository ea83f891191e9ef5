"""Attributions agree with captum where captum sees the ReLUs, and see those that captum does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from captum.attr import Deconvolution, GuidedBackprop, NoiseTunnel, Saliency
from torch import Tensor, nn
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.insight.attribution import deconv, gradient, guided
from gradpolicy.tasks import QuantizedConvNet

TARGETS = torch.tensor([2, 0, 1])


class Modules(nn.Module):
    """Two convolutions and a linear layer, with a ReLU module after each but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.norm, self.dropout = nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.relu1(self.norm(self.first(images)))
        return self.head(self.dropout(self.relu2(self.second(features))).flatten(1))


class Functions(Modules):
    """The same with functions in place of the modules, one of them in place."""

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.norm(self.first(images)))
        return self.head(self.dropout(self.second(features).relu_()).flatten(1))


@pytest.fixture
def modules() -> Modules:
    return Modules().eval()


@pytest.fixture
def functions(modules: Modules) -> Functions:
    model = Functions().eval()
    model.load_state_dict(modules.state_dict())
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 2, 6, 6)


@pytest.mark.parametrize(("method", "peer"), [(guided, GuidedBackprop), (deconv, Deconvolution)])
def test_relu_modules_and_functions_give_what_captum_gives_for_modules(
    method: Callable, peer: type, modules: Modules, functions: Functions, images: Tensor
) -> None:
    expected = peer(modules).attribute(images.clone().requires_grad_(), TARGETS).detach()
    for model in (modules, functions):
        torch.testing.assert_close(method(model, images, TARGETS), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected, gradient(functions, images, TARGETS))


def test_captums_methods_average_gradients_under_policies(functions: Functions, images: Tensor) -> None:
    with gp.install(functions, [gp.Guided()]):
        smooth = NoiseTunnel(Saliency(functions)).attribute(
            images, nt_samples=2, stdevs=0.0, target=TARGETS, abs=False
        )
    torch.testing.assert_close(smooth, guided(functions, images, TARGETS))


def test_the_gradient_is_that_of_each_score_alone(modules: Modules, images: Tensor) -> None:
    for image, target, found in zip(images, TARGETS, gradient(modules, images, TARGETS), strict=True):
        alone = torch.func.grad(lambda x, target=target: modules(x[None])[0, target])(image)
        torch.testing.assert_close(found, alone)


def test_without_a_target_the_predicted_class_is_attributed(modules: Modules, images: Tensor) -> None:
    predicted = modules(images).argmax(1)
    torch.testing.assert_close(gradient(modules, images), gradient(modules, images, predicted))
    assert torch.equal(gradient(modules, images, 1), gradient(modules, images, [1, 1, 1]))


@pytest.mark.parametrize("method", [gradient, guided, deconv])
def test_the_model_is_left_as_it_was(method: Callable, functions: Functions, images: Tensor) -> None:
    model = functions.train()
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)

    def flags() -> list[tuple]:
        return [(each.training, len(each._forward_hooks), set(vars(each))) for each in model.modules()]

    before, weights = flags(), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    method(model, images)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert flags() == before
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(random_state, torch.get_rng_state())
    assert images.grad is None
    assert not images.requires_grad


def test_it_works_within_inference_mode(modules: Modules, images: Tensor) -> None:
    expected = guided(modules, images)
    with torch.inference_mode():
        assert torch.equal(guided(modules, images.clone()), expected)


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
        (lambda model, images: gradient(model, images, policies=[gp.Stop(modules="head")]), "no gradient"),
    ],
)
def test_wrong_input_is_named(call: Callable, message: str, modules: Modules, images: Tensor) -> None:
    with pytest.raises(gp.PolicyError, match=message):
        call(modules, images)
