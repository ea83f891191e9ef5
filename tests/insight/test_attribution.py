"""Attributions agree with captum where captum sees the ReLUs, and see those that captum does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from captum.attr import Deconvolution, GuidedBackprop, GuidedGradCam
from torch import Tensor, nn
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.insight import attribution
from gradpolicy.insight.attribution import METHODS, gradient, guided, guided_gradcam, smoothgrad
from gradpolicy.insight.attribution_checks import insertion_deletion, random_order
from gradpolicy.tasks import DigitsDataModule, QuantizedConvNet

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


def captum_says(method: str, model: nn.Module, images: Tensor) -> Tensor:
    """What captum gives; its Grad-CAM is at the last convolution."""
    if method == "guided_gradcam":
        found = GuidedGradCam(model, model.second).attribute(
            images.clone().requires_grad_(), TARGETS, interpolate_mode="bilinear"
        )
    else:
        peer = {"guided": GuidedBackprop, "deconv": Deconvolution}[method]
        found = peer(model).attribute(images.clone().requires_grad_(), TARGETS)
    return found.detach()


@pytest.mark.parametrize("method", ["guided", "deconv", "guided_gradcam"])
def test_relu_modules_and_functions_give_what_captum_gives_for_modules(
    method: str, modules: Modules, functions: Functions, images: Tensor
) -> None:
    expected = captum_says(method, modules, images)
    for model in (modules, functions):
        found = METHODS[method](model, images, TARGETS)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected, gradient(functions, images, TARGETS))


def test_the_gradient_is_that_of_each_score_alone(modules: Modules, images: Tensor) -> None:
    for image, target, found in zip(images, TARGETS, gradient(modules, images, TARGETS), strict=True):
        alone = torch.func.grad(lambda x, target=target: modules(x[None])[0, target])(image)
        torch.testing.assert_close(found, alone)


def test_without_a_target_the_predicted_class_is_attributed(modules: Modules, images: Tensor) -> None:
    predicted, probabilities = attribution.predict(modules, images)
    torch.testing.assert_close(gradient(modules, images), gradient(modules, images, predicted))
    assert torch.equal(gradient(modules, images, 1), gradient(modules, images, [1, 1, 1]))
    torch.testing.assert_close(probabilities, modules(images).softmax(1).amax(1))


def test_the_smoothed_gradient_of_a_quadratic_score_is_the_gradient_at_the_mean_noisy_image() -> None:
    class Quadratic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sum(1, keepdim=True)

    x = torch.tensor([[0.0, 1.0, 3.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    noise = sum(torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(7)) / 7
    expected = 2 * (x + 0.2 * 3 * noise)
    found = smoothgrad(Quadratic(), x, 0, samples=7, noise=0.2, seed=4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", list(METHODS))
def test_the_model_is_left_as_it_was(method: str, functions: Functions, images: Tensor) -> None:
    model = functions.train()
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)

    def flags() -> list[tuple]:
        return [(each.training, len(each._forward_hooks), set(vars(each))) for each in model.modules()]

    before, weights = flags(), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    METHODS[method](model, images)
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
        (lambda *_: attribution.get_method("guidd"), "method: unknown .* 'guidd'; did you mean 'guided'"),
        (lambda model, images: gradient(model, images.long()), "torch.int64 given, floating point needed"),
        (lambda model, images: gradient(model, images, 3), "classes 0 to 2, 3 given"),
        (lambda model, images: guided_gradcam(model, images, layer="secnd"), "unknown module 'secnd'"),
        (lambda model, images: guided_gradcam(nn.Flatten(), images), "no nn.Conv2d"),
        (lambda model, images: smoothgrad(model, images, samples=0), "smoothgrad.samples: must be"),
        (
            lambda model, images: attribution.input_gradient(lambda x: model(x.detach()), images),
            "no gradient reaches the images",
        ),
        (lambda model, images: attribution.integrated(model, images.flatten(1)), "images: shape"),
        (lambda model, images: attribution.integrated(model, images, steps=0), r"integrated\.steps"),
        (
            lambda model, images: attribution.deconv(model, images, policies=[gp.Stop(modules="relu3")]),
            "relu3",
        ),
    ],
)
def test_wrong_input_is_named(call: Callable, message: str, modules: Modules, images: Tensor) -> None:
    with pytest.raises(gp.PolicyError, match=message):
        call(modules, images)


def test_integrated_gradients_add_up_to_what_the_score_gains_from_the_blurred_image() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))
    images = torch.rand(5, 1, 8, 8)
    found = attribution.integrated(model, images, target=1, steps=64)
    gained = (model(images) - model(attribution.blur(images)))[:, 1]
    torch.testing.assert_close(found.sum(dim=(1, 2, 3)), gained, rtol=1e-3, atol=1e-4)


def test_the_pixels_that_integrated_finds_matter_more_than_others_to_a_trained_network() -> None:
    """On the default job's digits: guided gradients of the image alone were no better than a random order."""
    torch.manual_seed(0)
    data = DigitsDataModule(batch_size=64)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    model = QuantizedConvNet(width=8, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    through = gp.StraightThrough(ops=["round"])
    with gp.install(model, [through]):
        for _ in range(4):
            for images, labels in data.train_dataloader():
                optimizer.zero_grad()
                functional.cross_entropy(model(images).logits, labels).backward()
                optimizer.step()
    model.eval()
    images = data.test_set.tensors[0][:128]
    found = attribution.integrated(model, images, policies=[through, gp.Guided()])
    curves = insertion_deletion(model, images, found)
    random = insertion_deletion(model, images, random_order(images))
    assert curves.insertion_area.mean() > random.insertion_area.mean() + 0.03
    assert curves.deletion_area.mean() < random.deletion_area.mean() - 0.05
