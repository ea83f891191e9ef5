"""Gradients of active rows alone: what is computed equals the rows of the whole gradient."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradpolicy.freezing import row_gradients
from gradpolicy.freezing.row_gradients import set_rows, set_whole
from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient
from tests.fixtures import through_a_file

Build = Callable[[], nn.Module]


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=2)
        self.head = nn.Linear(4, 9)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


class Attention(nn.Module):
    """Attention that projects by one packed weight."""

    def __init__(self, *, key: bool = True, value: bool = True, weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.same_key, self.same_value, self.weights = key, value, weights

    def forward(self, x: Tensor) -> Tensor:
        key = x if self.same_key else x.sin()
        value = key if self.same_value else x.cos()
        return self.attention(x, key, value, need_weights=self.weights)[0]


class Formula(nn.Module):
    """A weight within a formula of one's own."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.formula, self.weight = formula, nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight)


def tokens() -> Tensor:
    return torch.arange(10).remainder(9).view(2, 5)


def of_shape(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Build, Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 6), of_shape(2, 3, 6)),
    "linear of vectors, no bias": (lambda: nn.Linear(6, 6, bias=False), of_shape(6)),
    "in-place function": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(True)), of_shape(2, 3, 6)),
    "addmm": (lambda: Formula(lambda x, w: torch.addmm(torch.ones(6), x, w)), of_shape(5, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), of_shape(2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), bias=False), of_shape(2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), of_shape(1, 4, 3, 4, 3)),
    "conv with groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), of_shape(2, 4, 5, 5)),
    "conv padded to the same size": (lambda: nn.Conv2d(4, 6, 3, padding="same"), of_shape(2, 4, 5, 5)),
    "conv of one image": (lambda: nn.Conv2d(4, 6, 3), of_shape(4, 5, 5)),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 3), of_shape(2, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(9, 6), tokens),
    "embedding with padding": (lambda: nn.Embedding(9, 6, padding_idx=-3), tokens),
    "embedding by frequency": (lambda: nn.Embedding(9, 6, scale_grad_by_freq=True), tokens),
    "tied head": (Tied, tokens),
    "attention": (Attention, of_shape(2, 3, 6)),
    "attention that gives its weights": (lambda: Attention(weights=True), of_shape(2, 3, 6)),
    "attention to other tokens": (lambda: Attention(key=False), of_shape(2, 3, 6)),
    "attention of three inputs": (lambda: Attention(key=False, value=False), of_shape(2, 3, 6)),
    "weight in chunks": (
        lambda: Formula(lambda x, w: torch.cat([F.linear(x, each) for each in w.chunk(2)], -1)),
        of_shape(2, 6),
    ),
    "weight in parts of columns": (
        lambda: Formula(lambda x, w: sum(F.linear(x[..., :3], each) for each in w.split(3, dim=-1))),
        of_shape(2, 6),
    ),
    "matmul": (lambda: Formula(lambda x, w: x @ w.T), of_shape(2, 3, 6)),
    "einsum": (lambda: Formula(lambda x, w: torch.einsum("bi,io->bo", x, w)), of_shape(2, 6)),
    "used twice": (
        lambda: Formula(lambda x, w: F.linear(F.linear(x, w).tanh(), w * 2) + w[0]),
        of_shape(2, 6),
    ),
}
each_dim = pytest.mark.parametrize("dim", [0, 1, None], ids=["rows", "columns", "entries"])


WHOLE = {
    "conv with groups",
    "conv padded to the same size",
    "conv of one image",
    "transposed conv",
    "embedding by frequency",
    "matmul",
    "einsum",
    "used twice",
}
"""Cases in which a function has a whole gradient, of which rows are kept."""


def weights(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.dim() > 1)


def every_other(weight: Tensor, dim: int | None) -> ActiveRows:
    return ActiveRows(torch.arange(0, weight.numel() if dim is None else weight.shape[dim], 2), dim)


def with_rows(module: nn.Module, dim: int | None = 0) -> nn.Module:
    """Return a copy of which every other row, column or entry trains."""
    copied = copy.deepcopy(module)
    for weight in weights(copied):
        set_rows(weight, every_other(weight, dim))
    return copied


def check_equal(module: nn.Module, reference: nn.Module, dim: int | None) -> None:
    for own, whole in zip(module.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None
        if own.dim() == 1:
            torch.testing.assert_close(own.grad, whole.grad)
        else:
            assert isinstance(own.grad, RowGradient)
            torch.testing.assert_close(own.grad.held, every_other(whole, dim).select(whole.grad))


@each_dim
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_rows(case: str, dim: int | None) -> None:
    build, inputs = CASES[case]
    torch.manual_seed(0)
    reference = build()
    module = with_rows(reference, dim)
    gradients = []
    for each in (reference, module):
        x = inputs()
        x = x.requires_grad_() if x.is_floating_point() else x
        for _ in range(2):
            each(x).square().sum().backward()
        gradients.append(x.grad)
    check_equal(module, reference, dim)
    torch.testing.assert_close(gradients[1], gradients[0])


@each_dim
@pytest.mark.parametrize("case", sorted(CASES.keys() - WHOLE))
def test_no_whole_gradient_is_computed(case: str, dim: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    build, inputs = CASES[case]
    module = with_rows(build(), dim)
    computed = []
    monkeypatch.setattr(row_gradients, "_whole", lambda weight: computed.append(weight) or weight.detach())
    with torch.enable_grad():
        module(inputs().requires_grad_() if inputs is not tokens else inputs())
    assert bool(computed) is (dim is None)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """A network of which rows train, and the same as a whole."""
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
    return with_rows(reference), reference


def test_a_gradient_of_a_gradient_goes_through_the_rows(pair) -> None:
    for each in pair:
        x = of_shape(3, 4)().requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).tanh().sum(), x, create_graph=True)
        (gradient.square().sum() + each(x).sum()).backward()
    check_equal(*pair, 0)


@pytest.mark.supports("checkpointing", loop="plain")
@pytest.mark.parametrize("reentrant", [True, False])
def test_rows_under_activation_checkpointing(pair, reentrant: bool) -> None:
    for each in pair:
        checkpoint(each, of_shape(3, 4)().requires_grad_(), use_reentrant=reentrant).sum().backward()
    check_equal(*pair, 0)


def test_rows_under_autocast_have_the_parameters_dtype(pair) -> None:
    for each in pair:
        with torch.autocast("cpu", torch.bfloat16):
            output = each(of_shape(3, 4)())
        output.float().square().sum().backward()
    assert output.dtype is torch.bfloat16
    check_equal(*pair, 0)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_parameter_gets_the_whole_gradient(register: str) -> None:
    module = with_rows(nn.Linear(4, 6))
    seen: list[torch.Size] = []
    getattr(module.weight, register)(lambda value: seen.append(value.shape))
    module(torch.ones(1, 4)).sum().backward()
    assert seen == [module.weight.shape]
    assert not isinstance(module.weight.grad, RowGradient)


EAGER = pytest.param(
    "eager",
    marks=pytest.mark.skipif(
        torch.__version__ < (2, 12), reason="it runs uncompiled functions in torch 2.11"
    ),
)


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_compiled_code_computes_the_whole_gradient(backend: str) -> None:
    module = with_rows(nn.Linear(4, 6))
    torch.compile(module, backend=backend, fullgraph=True)(torch.ones(1, 4)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(6, 4))


def test_a_parameter_of_another_dtype_computes_the_whole_gradient() -> None:
    module = with_rows(nn.Linear(4, 6)).double()
    module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(6, 4, dtype=torch.float64))


def test_copies_and_pickles_are_plain_parameters() -> None:
    module = with_rows(nn.Linear(4, 6))
    for other in (copy.deepcopy(module), through_a_file(module, weights_only=False)):
        assert type(other.weight) is nn.Parameter
        assert torch.equal(other.weight, module.weight)
    assert type(module.state_dict()["weight"]) is Tensor


def test_a_parameter_becomes_whole_again() -> None:
    module = with_rows(nn.Linear(4, 6))
    set_whole(module.weight)
    assert type(module.weight) is nn.Parameter
    module(torch.ones(1, 4)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(6, 4))
