"""Under masks of rows, linear and convolution modules compute the gradients of active rows only."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradpolicy.freezing import row_gradients
from gradpolicy.freezing.row_gradients import RowGradients
from tests.fixtures import through_a_file

Call = Callable[[nn.Module, Tensor], Tensor]


def rows_mask(weight: Tensor) -> Tensor:
    """The mask in which every third row trains."""
    return (torch.arange(len(weight)) % 3 == 0).view(-1, *[1] * (weight.dim() - 1))


def with_rows(module: nn.Module) -> nn.Module:
    """Return a copy whose weights train in every third row."""
    copied = copy.deepcopy(module)
    masks = {each: rows_mask(each) for each in copied.parameters() if each.dim() > 1}
    RowGradients(copied).set(masks)
    return copied


def of_shape(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def two_layers(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9, **settings), nn.Tanh(), nn.Linear(9, 7, **settings))


def gradients(module: nn.Module, x: Tensor, run: Call) -> dict[str, Tensor | None]:
    """The output and all gradients of a call."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = run(module, x)
    output.float().square().sum().backward()
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **named}


def check_rows(
    module: nn.Module, x: Tensor, run: Call = call, *, rows: bool = True, **tolerance: Any
) -> None:
    """Check gradients against the ordinary ones, of which active rows alone are wanted if `rows` is True."""
    found, wanted = (gradients(each, x, run) for each in (with_rows(module), module))
    for name, value in wanted.items():
        if value is not None and rows and name in dict(module.named_parameters()) and value.dim() > 1:
            value = value * rows_mask(value)
        assert type(found[name]) is type(value)
        torch.testing.assert_close(
            found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 9)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


class Attention(nn.Module):
    """Attention, which passes its weights to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Doubled(nn.Conv1d):
    """A convolution that changes what PyTorch's own forward calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(input, weight, bias)


TOKENS = torch.arange(10).remainder(9).view(2, 5)
OF_ROWS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (two_layers, of_shape(5, 6)),
    "linear without bias": (lambda: two_layers(bias=False), of_shape(5, 6)),
    "linear of one vector": (two_layers, of_shape(6)),
    "linear of many dimensions": (two_layers, of_shape(2, 3, 4, 6)),
    "linear of nothing": (two_layers, of_shape(0, 6)),
    "linear before an in-place function": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True)),
        of_shape(2, 3, 6),
    ),
    "conv1d": (lambda: nn.Conv1d(3, 7, 3, stride=2, padding=1), of_shape(2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), bias=False), of_shape(2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), of_shape(1, 4, 3, 4, 3)),
    "conv in channels_last": (
        lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
        of_shape(2, 4, 9, 9).to(memory_format=torch.channels_last),
    ),
    "bfloat16": (lambda: two_layers().bfloat16(), of_shape(5, 6).bfloat16()),
}
ORDINARY: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv with groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), of_shape(2, 4, 5, 5)),
    "conv padded to the same size": (lambda: nn.Conv2d(4, 6, 3, padding="same"), of_shape(2, 4, 5, 5)),
    "conv with reflected borders": (
        lambda: nn.Conv2d(3, 7, 3, padding=(1, 2), padding_mode="reflect"),
        of_shape(2, 3, 9, 9),
    ),
    "conv of one image": (lambda: nn.Conv2d(4, 6, 3), of_shape(4, 5, 5)),
    "conv of a class of one's own": (lambda: Doubled(4, 6, 3), of_shape(2, 4, 5)),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 3), of_shape(2, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(9, 6), TOKENS),
    "embedding by frequency": (lambda: nn.Embedding(9, 6, scale_grad_by_freq=True), TOKENS),
    "attention": (Attention, of_shape(2, 3, 6)),
    "complex numbers": (lambda: nn.Linear(4, 4, dtype=torch.complex64), of_shape(2, 4)),
}
"""Modules that compute ordinary gradients, since no cheaper ones are supported."""


@pytest.mark.parametrize("case", OF_ROWS)
def test_only_active_rows_have_a_gradient(case: str) -> None:
    make, x = OF_ROWS[case]
    check_rows(make(), x, **({"rtol": 0.02, "atol": 0.02} if case == "bfloat16" else {}))


@pytest.mark.parametrize("case", ORDINARY)
def test_other_modules_have_their_ordinary_gradient(case: str) -> None:
    make, x = ORDINARY[case]
    if case == "complex numbers":
        check_rows(make(), x.cfloat(), lambda module, x: module(x).abs(), rows=False)
    else:
        check_rows(make(), x, rows=False)


class Cut(torch.autograd.Function):
    """A product with a part of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor) -> Tensor:
        ctx.save_for_backward(x, part)
        return x @ part.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, part = ctx.saved_tensors
        return gradient @ part, gradient.t() @ x


def in_chunks(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([Cut.apply(x, part) for part in module.weight.chunk(3)], -1)


def in_checkpointed_chunks(module: nn.Module, x: Tensor) -> Tensor:
    parts = module.weight.chunk(3)
    return torch.cat([checkpoint(F.linear, x, part, use_reentrant=True) for part in parts], -1)


USES: dict[str, Call] = {
    "by keyword": lambda module, x: F.linear(input=x, weight=module.weight),
    "by position": lambda module, x: F.linear(x, module.weight, module.bias),
    "in chunks": in_chunks,
    "in checkpointed chunks": in_checkpointed_chunks,
    "in a formula": lambda module, x: torch.einsum("bi,oi->bo", x, 2 * module.weight) + module.weight[0, 0],
    "in attention": lambda module, x: F.linear(x, module.weight) @ module.weight,
}


@pytest.mark.parametrize("use", USES)
def test_other_uses_of_a_weight_give_its_ordinary_gradient(use: str) -> None:
    check_rows(nn.Linear(6, 9), of_shape(5, 6), USES[use], rows=False)


def test_a_tied_head_restricts_its_part_of_the_gradient() -> None:
    """Rows that do not train have the embedding's gradient only, which the optimizer ignores."""
    module = Tied()
    restricted, ordinary = (gradients(each, TOKENS, call) for each in (with_rows(module), module))
    found, wanted = restricted["embedding.weight"], ordinary["embedding.weight"]
    rows = rows_mask(module.head.weight).flatten()
    torch.testing.assert_close(found[rows], wanted[rows])
    assert not torch.isclose(found[~rows], wanted[~rows]).any()


def under_autocast(run: Call) -> Call:
    def autocast(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = run(module, x)
        assert output.dtype is (torch.float64 if x.dtype is torch.float64 else torch.bfloat16)
        return output

    return autocast


WAYS: dict[str, Call] = {
    "by keyword": lambda module, x: module(input=x),
    "twice": lambda module, x: torch.cat([module(x), module(x.sin())]),
    "checkpointed": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (two_layers, of_shape(5, 6)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 5, 3)), of_shape(2, 3, 9, 9)),
}
each_module = pytest.mark.parametrize("kind", MODULES)


@pytest.mark.supports("checkpointing", loop="plain")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", WAYS)
@each_module
def test_rows_however_a_module_is_called(kind: str, way: str, autocast: bool) -> None:
    make, x = MODULES[kind]
    if autocast:
        check_rows(make(), x, under_autocast(WAYS[way]), rtol=0.02, atol=0.1)
    else:
        check_rows(nn.Sequential(make()) if way == "by keyword" else make(), x, WAYS[way])


def test_autocast_leaves_float64_alone() -> None:
    check_rows(two_layers().double(), of_shape(5, 6).double(), under_autocast(call))


# ---- compiled code


EAGER = pytest.param(
    "eager",
    marks=pytest.mark.skipif(
        torch.__version__ < (2, 12), reason="it runs uncompiled functions in torch 2.11"
    ),
)


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
@each_module
def test_rows_in_compiled_code(kind: str, backend: str, autocast: bool) -> None:
    def compiled(module: nn.Module, x: Tensor) -> Tensor:
        return torch.compile(module, backend=backend, fullgraph=True)(x)

    make, x = MODULES[kind]
    if autocast:
        check_rows(make(), x, under_autocast(compiled), rtol=0.02, atol=0.1)
    else:
        check_rows(make(), x, compiled)


def test_compiled_code_follows_the_rows() -> None:
    module = nn.Linear(6, 9)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    rows = RowGradients(module)
    for active in ([], [0, 3], [1, 4], [2, 5, 6], [7]):
        mask = torch.zeros(9, 1, dtype=torch.bool)
        mask[active] = True
        rows.set({module.weight: mask} if active else {})
        module.zero_grad()
        compiled(of_shape(5, 6)).square().sum().backward()
        moved = module.weight.grad.any(1).nonzero().flatten().tolist()
        assert moved == (active or list(range(9)))


# ---- what a loop does with gradients


def test_views_of_the_gradient_can_be_written_to() -> None:
    module = with_rows(nn.Linear(6, 9))
    module(torch.ones(2, 6)).sum().backward()
    gradient = module.weight.grad
    gradient[3].mul_(0)
    gradient[:, 0] = 0
    gradient.view(-1)[1] = 5
    for part in gradient.chunk(3):
        part.add_(1)
    expected = torch.ones(9, 6)
    expected[[0, 6], 1:] += 2
    expected[0, 1] = 6
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_several_batches_and_rows_add_up(set_to_none: bool) -> None:
    module = nn.Linear(6, 9)
    rows = RowGradients(module)
    for first in (0, 1):
        rows.set({module.weight: (torch.arange(9) % 2 == first).view(9, 1)})
        for _ in range(2):
            module(torch.ones(1, 6)).sum().backward()
        assert module.weight.grad[:, 0].tolist() == [2.0 * (row % 2 == first) for row in range(9)]
        module.zero_grad(set_to_none)


def test_hooks_get_dense_gradients_which_they_can_replace() -> None:
    module, seen = with_rows(nn.Linear(4, 6)), []
    module.weight.register_hook(lambda value: seen.append(type(value)) or 2 * value)
    module.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.shape))
    module(torch.ones(1, 4)).sum().backward()
    assert seen == [Tensor, (6, 4)]
    assert module.weight.grad[:, 0].tolist() == [2, 0, 0, 2, 0, 0]


# ---- other ways to differentiate


@each_module
def test_autograd_grad_gives_gradients_of_rows(kind: str) -> None:
    make, x = MODULES[kind]
    module = make()
    found, wanted = (
        torch.autograd.grad(each(x).square().sum(), list(each.parameters()))
        for each in (with_rows(module), module)
    )
    for own, ordinary in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, ordinary * rows_mask(ordinary) if own.dim() > 1 else ordinary)


@each_module
def test_gradients_of_gradients(kind: str) -> None:
    """A penalty on the gradient of the input, which depends on every row of the weights."""
    make, x = MODULES[kind]
    module, results = make().double(), []
    for each in (with_rows(module), module):
        inputs = x.double().requires_grad_()
        (gradient,) = torch.autograd.grad(each(inputs).tanh().sum(), inputs, create_graph=True)
        (gradient.square().sum() + each(inputs).sum()).backward()
        results.append([inputs.grad, *(parameter.grad for parameter in each.parameters())])
    for own, ordinary in zip(*results, strict=True):
        rows = rows_mask(own).flatten() if own.shape != x.shape and own.dim() > 1 else slice(None)
        torch.testing.assert_close(own[rows], ordinary[rows])


@pytest.mark.parametrize("kind", MODULES)
def test_gradcheck_passes_twice(kind: str) -> None:
    module = {"linear": nn.Linear(3, 4), "conv": nn.Conv2d(2, 3, 2)}[kind].double()
    x = of_shape(*{"linear": (2, 3), "conv": (2, 2, 4, 4)}[kind]).double().requires_grad_()
    every_row = torch.ones(len(module.weight), *[1] * (module.weight.dim() - 1), dtype=torch.bool)
    RowGradients(module).set({module.weight: every_row})
    assert "forward" in vars(module)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight, "bias": bias}, (x,))

    inputs = (x, module.weight, module.bias)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@each_module
def test_gradients_of_single_samples(kind: str) -> None:
    make, x = MODULES[kind]
    module, found = make(), []
    for each in (with_rows(module), module):
        parameters = {name: value.detach() for name, value in each.named_parameters()}

        def loss(parameters, sample, module=each):
            return functional_call(module, parameters, (sample[None],)).square().sum()

        found.append(vmap(grad(loss), (None, 0))(parameters, x))
    for name, value in found[1].items():
        wanted = value * rows_mask(value[0]) if value.dim() > 2 else value
        torch.testing.assert_close(found[0][name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_weights", [False, True])
def test_forward_mode_is_ordinary(of_weights: bool) -> None:
    def tangents(module: nn.Module) -> tuple[Tensor, Tensor]:
        if not of_weights:
            return jvp(module, (of_shape(5, 6),), (torch.ones(5, 6),))
        parameters = dict(module.named_parameters())
        ones = {name: torch.ones_like(value) for name, value in parameters.items()}
        return jvp(lambda given: functional_call(module, given, (of_shape(5, 6),)), (parameters,), (ones,))

    module = two_layers()
    torch.testing.assert_close(tangents(with_rows(module)), tangents(module))


class Doubling(TorchFunctionMode):
    """Doubles products, as a flow policy may."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return 2 * function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_function_modes_see_the_ordinary_product() -> None:
    def doubled(module: nn.Module, x: Tensor) -> Tensor:
        with Doubling():
            return module(x)

    check_rows(two_layers(), of_shape(5, 6), doubled, rows=False)


# ---- memory


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_but_the_input_and_the_weight_is_saved(autocast: bool) -> None:
    saved: list[int] = []
    module, x = with_rows(nn.Linear(6, 9)), of_shape(50, 6)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.nbytes), lambda _: None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        module(x)
    assert sorted(saved) == [3 * 8, 9 * 6 * 4, x.nbytes // (2 if autocast else 1)]


def test_checkpointing_keeps_no_inner_input() -> None:
    saved: list[int] = []
    module, x = with_rows(two_layers()), of_shape(50, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.numel()), lambda _: None):
        checkpoint(module, x, use_reentrant=False)
    assert sum(saved) <= x.numel()


# ---- modules


def test_copies_and_pickles_have_ordinary_gradients() -> None:
    module = with_rows(nn.Linear(4, 6))
    for other in (copy.deepcopy(module), through_a_file(module, weights_only=False)):
        other(torch.ones(1, 4)).sum().backward()
        assert torch.equal(other.weight.grad, torch.ones(6, 4))
        RowGradients(other).set({other.weight: rows_mask(other.weight)})
        other.zero_grad()
        other(torch.ones(1, 4)).sum().backward()
        assert torch.equal(other.weight.grad, rows_mask(other.weight).float().expand(6, 4))
    assert module.weight.grad is None


def test_a_module_of_another_dtype_has_rows_too() -> None:
    module = with_rows(nn.Linear(4, 6)).double()
    module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert module.weight.grad[:, 0].tolist() == [1, 0, 0, 1, 0, 0]


def test_traces_scripts_and_exports_compute_the_same() -> None:
    module, x = with_rows(two_layers()), of_shape(2, 6)
    traced, exported = torch.jit.trace(module, x), torch.export.export(module, (x,)).module()
    assert torch.equal(traced(2 * x), module(2 * x))
    torch.testing.assert_close(exported(x), module(x))


def wrapped(module: nn.Module) -> None:
    """Replace the forward of a module, as accelerate does."""
    inner = module.forward
    module.forward = lambda x: inner(x)


@pytest.mark.parametrize("wrap", ["never", "before", "after"])
def test_released_modules_have_ordinary_gradients(wrap: str) -> None:
    module = nn.Linear(4, 6)
    rows = RowGradients(module)
    if wrap == "before":
        wrapped(module)
    rows.set({module.weight: rows_mask(module.weight)})
    assert rows.active is (wrap != "before")
    if wrap == "after":
        wrapped(module)
    rows.release()
    assert not rows.active
    assert ("forward" in vars(module)) is (wrap != "never")
    module(torch.ones(1, 4)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(6, 4))


ENTRIES = {
    "entries": torch.arange(54).view(9, 6) % 2 == 0,
    "columns": torch.arange(6).view(1, 6) % 2 == 0,
    "the full tensor": torch.ones(1, 1, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", ENTRIES)
def test_other_masks_have_ordinary_gradients(mask: str) -> None:
    module = nn.Linear(6, 9)
    rows = RowGradients(module)
    rows.set({module.weight: ENTRIES[mask]})
    assert not rows.active


def test_only_the_product_of_rows_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, inner = [], row_gradients._gradient

    def follow(index: int, gradient: Tensor, *others: Any) -> Tensor:
        if index == 1:
            shapes.append(gradient.shape[-1])
        return inner(index, gradient, *others)

    monkeypatch.setattr(row_gradients, "_gradient", follow)
    with_rows(two_layers())(of_shape(5, 6)).sum().backward()
    assert shapes == [3, 3]
