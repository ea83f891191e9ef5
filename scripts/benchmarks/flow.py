"""The cost of flow policies, compared with captum and a hand-written ``autograd.Function``."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import Row, Step, one_thread, paired_ratio
from gradpolicy.policies import FlowPolicy


class Block(nn.Module):
    """Two convolutions with a residual connection, as in ResNet-18."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(before, channels, 3, stride, 1), nn.BatchNorm2d(channels)
        self.second, self.second_norm = nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels)
        self.relu_within, self.relu = nn.ReLU(), nn.ReLU()
        self.past: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            self.past = nn.Sequential(nn.Conv2d(before, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Add the two branches."""
        within = self.relu_within(self.first_norm(self.first(x)))
        return self.relu(self.second_norm(self.second(within)) + self.past(x))


class GuidedFunction(torch.autograd.Function):
    """A ReLU with the guided gradient, as people write it by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the ReLU."""
        output = torch.relu(x)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient's positive part where the ReLU was active."""
        (output,) = ctx.saved_tensors
        return grad.clamp(min=0) * (output > 0)


class GuidedLayer(nn.Module):
    """The same as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the Function."""
        return GuidedFunction.apply(x)


def resnet() -> tuple[nn.Module, Tensor]:
    """Return a network of ResNet-18's shape, with 17 ReLUs, and a batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, channels, stride), Block(channels, channels, 1)]
        before = channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 32, 32)


def tiny() -> tuple[nn.Module, Tensor]:
    """Return 24 tiny layers, in whose time every cost is visible, and a batch."""
    torch.manual_seed(0)
    layers = (layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.ReLU()))
    return nn.Sequential(*layers), torch.randn(4, 8)


def flow_resnet_eager() -> list[Row]:
    """Guided ReLUs on the ResNet-18 shape, batch 32 of 32 × 32 pixels."""
    plain, batch = resnet()
    by_hand = _with_layers(plain, GuidedLayer)
    return [
        _against(plain, _installed(plain, [gp.Guided()]), batch, "guided, eager", target=1.03, rounds=120),
        _against(plain, by_hand, batch, "guided by a Python Function, eager", rounds=20),
    ]


def flow_resnet_compiled() -> list[Row]:
    """The same under ``torch.compile``, against the compiled plain step."""
    plain, batch = resnet()
    compiled = torch.compile(copy.deepcopy(plain), fullgraph=True)
    guided = torch.compile(_installed(plain, [gp.Guided()]), fullgraph=True)
    return [_against(compiled, guided, batch, "guided, torch.compile", target=1.02, rounds=80)]


def flow_boundary() -> list[Row]:
    """Policies at module boundaries of the ResNet-18 shape: three together, and others alone."""
    plain, batch = resnet()
    scale, clip, reverse = (
        gp.Scale(0.5, modules="5"),
        gp.Clip(norm=1.0, modules="8"),
        gp.Reverse(modules="14"),
    )
    cases: dict[str, tuple[int, list[FlowPolicy]]] = {
        "scale, clip and reverse": (120, [scale, clip, reverse]),
        "scale": (20, [scale]),
        "clip": (20, [clip]),
        "reverse": (20, [reverse]),
        "straight through a layer": (60, [gp.StraightThrough(modules="11.relu")]),
        "one argument": (60, [gp.Scale(0.5, modules="11", argument="x")]),
    }
    return [
        _against(plain, _installed(plain, policies), batch, what, target=1.01, rounds=rounds)
        for what, (rounds, policies) in cases.items()
    ]


def flow_tiny() -> list[Row]:
    """Guided ReLUs between tiny layers: a training step, and the input's gradient by us and by others."""
    plain, batch = tiny()
    guided, by_hand = _installed(plain, [gp.Guided()]), _with_layers(plain, GuidedLayer)
    inputs = batch.clone().requires_grad_()

    def gradient(model: nn.Module) -> Step:
        return _repeated(lambda: torch.autograd.grad(model(inputs)[:, 0].sum(), inputs))

    steps = {
        "gradpolicy": gradient(guided),
        "captum": _captum(plain, inputs),
    }
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peers = [
            paired_ratio(f"input gradient, guided: {name}", step, gradient(plain), rounds=24)
            for name, step in steps.items()
        ]
    what, times = "24 tiny layers: ", {"rounds": 100, "repeats": 10}
    return [
        _against(plain, guided, batch, f"{what}guided", target=1.35, **times),
        _against(plain, by_hand, batch, f"{what}a Python Function", **times),
        *peers,
    ]


def _against(
    baseline: Any,
    candidate: Any,
    batch: Tensor,
    what: str,
    *,
    rounds: int,
    target: float | None = None,
    repeats: int = 1,
) -> Row:
    def step(model: Any) -> Step:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(batch).sum().backward()

        return _repeated(run, repeats)

    with one_thread():
        return paired_ratio(what, step(candidate), step(baseline), target=target, rounds=rounds, warmup=2)


def _repeated(step: Step, repeats: int = 10) -> Step:
    return lambda: [step() for _ in range(repeats)]


def _installed(model: nn.Module, policies: Sequence[FlowPolicy]) -> nn.Module:
    duplicate = copy.deepcopy(model)
    gp.install(duplicate, policies)
    return duplicate


def _with_layers(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """Return a copy of a model with another layer for each ReLU."""
    duplicate = copy.deepcopy(model)
    for module in list(duplicate.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, layer())
    return duplicate


def _captum(plain: nn.Module, inputs: Tensor) -> Step:
    from captum.attr import GuidedBackprop

    guided = GuidedBackprop(copy.deepcopy(plain))
    return _repeated(lambda: guided.attribute(inputs, target=0))


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "flow_resnet_eager": flow_resnet_eager,
    "flow_resnet_compiled": flow_resnet_compiled,
    "flow_tiny": flow_tiny,
    "flow_boundary": flow_boundary,
}
