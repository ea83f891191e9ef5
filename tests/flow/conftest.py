"""Small networks, and the gradient of a function at a point."""

import copy
import functools
import sys
import types

import pytest
import torch
from torch import nn


@pytest.fixture
def gradient():
    """The gradient of the weighted sum of a function's result, and the result."""

    def of(function, x, weights=None):
        point = x.detach().clone().requires_grad_()
        result = function(point)
        (result * (torch.ones_like(result) if weights is None else weights)).sum().backward()
        return point.grad, result.detach()

    return of


@pytest.fixture
def gradients():
    """The gradients of a weighted sum of a function's result, None for an input that gets none."""

    def of(function, *inputs, weights=None):
        points = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
        result = function(*points)
        if weights is None:
            weights = torch.linspace(-1.0, 2.0, result.numel(), dtype=result.dtype).view_as(result)
        (result * weights).sum().backward()
        return [point.grad for point in points]

    return of


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.fixture
def as_module():
    return Function


@pytest.fixture
def compiled():
    """Compile anew, as one graph unless told otherwise."""
    torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "compiled"])
def run(request):
    """A function as it is, and compiled."""
    return request.getfixturevalue("compiled") if request.param == "compiled" else lambda function: function


class Quantised(nn.Module):
    """A linear layer, rounding and a ReLU, in a forward of its own."""

    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return torch.round(3 * self.linear(x)).relu()


class Net(nn.Module):
    """Two rounded blocks and a head."""

    def __init__(self, size=4):
        super().__init__()
        self.stem = nn.Linear(size, size)
        self.first = Quantised(size)
        self.second = Quantised(size)
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        return self.head(self.second(x + self.first(self.stem(x))))


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def batch():
    return torch.randn(8, 4)


@pytest.fixture
def parameter_gradients():
    """The gradients of a model's parameters for the sum of squares of its result."""

    def of(model, *inputs, call=None):
        model.zero_grad(set_to_none=True)
        (model if call is None else call)(*inputs).square().sum().backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    return of


@pytest.fixture
def same():
    """A check that two dicts of gradients agree."""

    def check(first, second, tolerance=1e-6):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
        return True

    return check


@pytest.fixture
def zennit(monkeypatch):
    """The package zennit, which asks for a torchvision that it hardly needs."""
    if "torchvision" not in sys.modules:
        vision = types.ModuleType("torchvision")
        models, ops = types.ModuleType("torchvision.models"), types.ModuleType("torchvision.ops")
        resnet, misc = types.ModuleType("torchvision.models.resnet"), types.ModuleType("torchvision.ops.misc")
        resnet.Bottleneck = type("Bottleneck", (nn.Module,), {})
        resnet.BasicBlock = type("BasicBlock", (nn.Module,), {})
        for name in ("VGG", "ResNet"):
            setattr(models, name, type(name, (nn.Module,), {}))
        misc.FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
        vision.models, vision.ops, models.resnet, ops.misc = models, ops, resnet, misc
        for module in (vision, models, ops, resnet, misc):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    return pytest.importorskip("zennit")


@pytest.fixture
def snapshot():
    """A function that returns the state of a model: its dicts, tables of hooks and flags."""

    def of(model):
        return {
            name: (
                {key: value for key, value in module.__dict__.items() if key[:1] != "_"},
                {key: copy.copy(value) for key, value in module.__dict__.items() if "hooks" in key},
                module._is_full_backward_hook,
                module.training,
                list(module.__dict__),
                [(p.requires_grad, p.grad, p._backward_hooks) for p in module._parameters.values()],
            )
            for name, module in model.named_modules()
        }

    return of
