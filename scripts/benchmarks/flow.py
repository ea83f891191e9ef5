"""What flow policies cost: ratios to the plain step; captum, zennit and a Python Function beside them."""

import copy
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import Row, one_thread, paired_ratio
from gradpolicy.policies import FlowPolicy

Step = Callable[[], Any]


class Block(nn.Module):
    """Two convolutions with a way round them, as in ResNet-18."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(before, channels, 3, stride, 1), nn.BatchNorm2d(channels)
        self.second, self.second_norm = nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels)
        self.relu_within, self.relu = nn.ReLU(), nn.ReLU()
        self.past: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            self.past = nn.Sequential(nn.Conv2d(before, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the two ways."""
        way = self.relu_within(self.first_norm(self.first(x)))
        return self.relu(self.second_norm(self.second(way)) + self.past(x))


class GuidedFunction(torch.autograd.Function):
    """What people write by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The ReLU."""
        output = torch.relu(x)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The positive part, where the ReLU was active."""
        (output,) = ctx.saved_tensors
        return grad.clamp(min=0) * (output > 0)


class GuidedLayer(nn.Module):
    """The same as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Applies the Function."""
        return GuidedFunction.apply(x)


class StepFunction(torch.autograd.Function):
    """A step with the gradient of the logistic function, as people write it by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The step."""
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The stand-in's derivative."""
        (x,) = ctx.saved_tensors
        return grad * (torch.sigmoid(x) * torch.sigmoid(-x))


class MaskedByHand(nn.Module):
    """Units that are on where they are positive, by that Function."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies with the step."""
        return x * StepFunction.apply(x)


class MaskedByComparison(nn.Module):
    """The same by a comparison, which has no gradient without a policy."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies with the cast comparison."""
        return x * (x > 0).to(x.dtype)


def resnet() -> nn.Module:
    """A network of ResNet-18's shape: 17 ReLUs."""
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
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def tiny() -> nn.Module:
    """24 tiny layers: nothing to hide a cost behind."""
    return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.ReLU())))


class Loop(nn.Module):
    """The same layers in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tiny().children())

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layers one by one."""
        for layer in self.layers:
            x = layer(x)
        return x


class ByFunction(nn.Module):
    """The same with the ReLU as a function, where captum and zennit give the plain gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layers one by one."""
        for layer in self.layers:
            x = nn.functional.relu(layer(x))
        return x


def flow_resnet() -> list[Row]:
    """Guided ReLUs on the ResNet-18 shape, batch 32 of 32 × 32 pixels: eager, compiled, and the peers."""
    return [*flow_resnet_eager(), *flow_resnet_peers(), *flow_resnet_compiled()]


def flow_resnet_eager() -> list[Row]:
    """The training step in eager mode."""
    plain, batch = _resnet_and_batch()
    guided = _installed(plain, [gp.Guided()])
    with one_thread():
        return [
            _against(plain, guided, batch, "guided, eager", target=1.03, rounds=120),
            _against(
                plain,
                _with_layers(plain, GuidedLayer),
                batch,
                "guided by a Python Function, eager",
                rounds=20,
            ),
        ]


def flow_resnet_compiled() -> list[Row]:
    """The training step under ``torch.compile``, against the compiled plain step."""
    plain, batch = _resnet_and_batch()
    compiled = torch.compile(copy.deepcopy(plain), fullgraph=True)
    guided = torch.compile(_installed(plain, [gp.Guided()]), fullgraph=True)
    with one_thread():
        return [_against(compiled, guided, batch, "guided, torch.compile", target=1.02, rounds=80)]


def flow_casts() -> list[Row]:
    """A rule on the comparison behind each of 17 masks, against the same gradient by a Python Function."""
    plain, batch = _resnet_and_batch()
    by_hand = _with_layers(plain, MaskedByHand)
    by_policy = _installed(_with_layers(plain, MaskedByComparison), [gp.UseRule("sigmoid", ops=["gt"])])
    with one_thread():
        return [_against(by_hand, by_policy, batch, "17 masks by a comparison", target=1.01, rounds=40)]


def flow_resnet_peers() -> list[Row]:
    """The gradient of the input, which is what captum and zennit give."""
    plain, batch = _resnet_and_batch()
    with one_thread():
        return _input_gradients(plain, batch, rounds=16)


def flow_tiny() -> list[Row]:
    """Guided ReLUs between 24 tiny layers."""
    torch.manual_seed(0)
    plain, batch = tiny(), torch.randn(4, 8)
    loop, by_function = Loop(), ByFunction()
    cases = (
        (plain, _installed(plain, [gp.Guided()]), "guided", 1.35),
        (plain, _with_layers(plain, GuidedLayer), "a Python Function", None),
        (loop, _installed(loop, [gp.Guided()]), "guided, in a forward of its own", None),
        (by_function, _installed(by_function, [gp.Guided()]), "guided, F.relu in a forward of its own", None),
    )
    with one_thread():
        rows = [
            _against(
                baseline, candidate, batch, f"24 tiny layers: {what}", target=target, rounds=100, repeats=10
            )
            for baseline, candidate, what, target in cases
        ]
        return [*rows, *_input_gradients(plain, batch, rounds=24, repeats=10)]


def flow_boundary() -> list[Row]:
    """Policies at module boundaries of the ResNet-18 shape: three together, and others alone."""
    plain, batch = _resnet_and_batch()
    rounds = {
        "scale, clip and reverse": 120,
        "scale": 20,
        "clip": 20,
        "reverse": 20,
        "straight through a layer": 60,
        "one argument": 60,
    }
    with one_thread():
        return [
            _against(plain, _installed(plain, _boundaries(what)), batch, what, target=1.01, rounds=count)
            for what, count in rounds.items()
        ]


def flow_boundary_compiled() -> list[Row]:
    """The same three under ``torch.compile``, against the compiled plain step."""
    plain, batch = _resnet_and_batch()
    what = "scale, clip and reverse"
    compiled = torch.compile(copy.deepcopy(plain), fullgraph=True)
    candidate = torch.compile(_installed(plain, _boundaries(what)), fullgraph=True)
    with one_thread():
        return [_against(compiled, candidate, batch, f"{what}, torch.compile", rounds=60)]


def flow_install() -> list[Row]:
    """Installing on a tree of 10,000 modules, in seconds per half second."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Dropout()) for _ in range(2_500)))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        installed = gp.install(model, [gp.Guided(), gp.Scale(0.5, modules="17.*")])
        seconds.append(time.perf_counter() - start)
        installed.remove()
    best = min(seconds)
    return [
        {
            "what": "install on 10,000 modules / 0.5 s",
            "ratio": best / 0.5,
            "target": 1.0,
            "unit": "time",
            "milliseconds": 1e3 * best,
        }
    ]


def _against(
    baseline: Any,
    candidate: Any,
    batch: Tensor,
    what: str,
    *,
    target: float | None = None,
    rounds: int = 9,
    repeats: int = 1,
) -> Row:
    return paired_ratio(
        what,
        _step(candidate, batch, repeats),
        _step(baseline, batch, repeats),
        target=target,
        rounds=rounds,
        warmup=2,
    )


def _step(model: Any, batch: Tensor, repeats: int = 1) -> Step:
    def run() -> None:
        for _ in range(repeats):
            model.zero_grad(set_to_none=True)
            model(batch).sum().backward()

    return run


def _installed(model: nn.Module, policies: list[Any]) -> nn.Module:
    duplicate = copy.deepcopy(model)
    gp.install(duplicate, policies)
    return duplicate


def _with_layers(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """A copy of a model with another layer for each ReLU."""
    duplicate = copy.deepcopy(model)
    for module in list(duplicate.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, layer())
    return duplicate


def _boundaries(named: str) -> list[FlowPolicy]:
    policies = {
        "scale": gp.Scale(0.5, modules="5"),
        "clip": gp.Clip(norm=1.0, modules="8"),
        "reverse": gp.Reverse(modules="14"),
        "straight through a layer": gp.StraightThrough(modules="11.relu"),
        "one argument": gp.Scale(0.5, modules="11", argument="x"),
    }
    return [policy for name, policy in policies.items() if name in named]


def _resnet_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return resnet(), torch.randn(32, 3, 32, 32)


def _input_gradients(plain: nn.Module, batch: Tensor, *, rounds: int, repeats: int = 1) -> list[Row]:
    """Guided backpropagation to the input: ours, and captum's and zennit's where they are installed."""
    inputs = batch.clone().requires_grad_()

    def repeated(step: Step) -> Step:
        return lambda: [step() for _ in range(repeats)]

    def gradient(model: nn.Module) -> Step:
        return repeated(lambda: torch.autograd.grad(model(inputs)[:, 0].sum(), inputs))

    steps = {"gradpolicy": gradient(_installed(plain, [gp.Guided()]))}
    if captum := _captum(plain):
        steps["captum"] = repeated(lambda: captum.attribute(inputs, target=0))
    if zennit := _zennit(plain):
        steps["zennit"] = gradient(zennit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            paired_ratio(f"input gradient, guided: {name}", step, gradient(plain), rounds=rounds)
            for name, step in steps.items()
        ]


def _captum(plain: nn.Module) -> Any:
    try:
        from captum.attr import GuidedBackprop
    except ImportError:
        return None
    return GuidedBackprop(copy.deepcopy(plain))


def _zennit(plain: nn.Module) -> nn.Module | None:
    _stub_torchvision()
    try:
        from zennit.composites import GuidedBackprop
    except ImportError:
        return None
    registered = copy.deepcopy(plain)
    GuidedBackprop().register(registered)
    return registered


def _stub_torchvision() -> None:
    """Zennit asks for names of torchvision that it does not need here."""
    if "torchvision" in sys.modules:
        return
    names = ("torchvision", "torchvision.models", "torchvision.models.resnet", "torchvision.ops")
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in (*names, "torchvision.ops.misc")}
    for name, classes in (
        ("torchvision.models", ("VGG", "ResNet")),
        ("torchvision.models.resnet", ("Bottleneck", "BasicBlock")),
        ("torchvision.ops.misc", ("FrozenBatchNorm2d",)),
    ):
        for class_name in classes:
            setattr(stubs[name], class_name, type(class_name, (nn.Module,), {}))
    stubs["torchvision"].models = stubs["torchvision.models"]
    stubs["torchvision"].ops = stubs["torchvision.ops"]
    sys.modules.update(stubs)


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "flow_resnet": flow_resnet,
    "flow_resnet_eager": flow_resnet_eager,
    "flow_casts": flow_casts,
    "flow_resnet_peers": flow_resnet_peers,
    "flow_resnet_compiled": flow_resnet_compiled,
    "flow_tiny": flow_tiny,
    "flow_boundary": flow_boundary,
    "flow_boundary_compiled": flow_boundary_compiled,
    "flow_install": flow_install,
}
