"""Rules through a whole module, from its output to its input."""

import dataclasses
import functools
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp

Coded = namedtuple("Coded", ["codes", "loss", "indices"])


@dataclasses.dataclass
class Output:
    codes: torch.Tensor
    loss: torch.Tensor
    note: str = "kept"


class Quantizer(nn.Module):
    """The nearest vectors of a codebook, and a loss that trains codebook and encoder."""

    def __init__(self, pack=Coded):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(5, 3))
        self.pack = pack

    def forward(self, x):
        indices = torch.cdist(x, self.codebook).argmin(-1)
        codes = self.codebook[indices]
        return self.pack(codes, (codes - x).square().mean(), indices)


class Model(nn.Module):
    def __init__(self, quantizer):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(3, 3), quantizer, nn.Linear(3, 2)

    def forward(self, x):
        return self.decoder(self.quantizer(self.encoder(x)))


class Bare:
    def __init__(self, codes, loss, indices):
        self.codes, self.loss = codes, loss


# What packs the outputs, the name of one, and what unpacks them.
PACKS = {
    "tuple": (lambda *parts: parts, 0, lambda result: result[:2]),
    "dict": (lambda codes, loss, _: {"codes": codes, "loss": loss}, "codes", lambda result: result.values()),
    "named tuple": (Coded, "codes", lambda result: result[:2]),
    "dataclass": (lambda *parts: Output(*parts[:2]), "codes", lambda result: (result.codes, result.loss)),
    "attribute": (Bare, "codes", lambda result: (result.codes, result.loss)),
}


@pytest.mark.parametrize("kind", PACKS)
def test_named_output(kind):
    pack, output, unpack = PACKS[kind]
    quantizer, x = Quantizer(pack), torch.randn(4, 3, requires_grad=True)
    weights = torch.randn(4, 3)
    codes, loss = unpack(quantizer(x))
    own, own_of_codebook = torch.autograd.grad(loss, [x, quantizer.codebook])
    with gp.install(quantizer, [gp.StraightThrough(modules="*", output=output)]):
        result = quantizer(x)
        assert type(result) is type(pack(x, x, x))
        again, loss = unpack(result)
        ((again * weights).sum() + loss).backward()
    assert torch.equal(again, codes)
    torch.testing.assert_close(x.grad, weights + own)
    torch.testing.assert_close(quantizer.codebook.grad, own_of_codebook)


def test_inside_own_leaves_parameters_their_gradient(gradients):
    layer, x, weights = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    (plain,) = torch.autograd.grad((layer(x) * weights).sum(), layer.weight)
    with gp.install(layer, [gp.StraightThrough(modules="", inside="own")]):
        own, found = torch.autograd.grad((layer(x) * weights).sum(), [layer.weight, x])
    torch.testing.assert_close(own, plain)
    torch.testing.assert_close(found, weights)
    with (
        gp.install(quantizer := Quantizer(), [gp.StraightThrough(modules="", output=0, inside="own")]),
        pytest.raises(gp.PolicyError, match="has outputs without a rule"),
    ):
        quantizer(x)


def test_rule_gets_all_inputs_and_the_output(as_module):
    def rule(grad, inputs, output):
        assert all(map(torch.equal, (*inputs, output), (x, shift, flags, result)))
        return 2 * grad, 3 * grad.sum(0), None

    layer = as_module(lambda x, shift, flags: torch.round(x + shift) * flags)
    x, shift = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    flags = torch.tensor([True, False, True])
    with gp.install(layer, [gp.UseRule(rule, modules="*", at="through")]):
        result = layer(x, shift, flags=flags)
        result.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))
    assert torch.equal(shift.grad, torch.full((3,), 12.0))


def test_rotation_trick(gradient):
    quantizer, x, weights = Quantizer(), torch.randn(4, 3), torch.randn(4, 3)
    codes = quantizer(x).codes
    with gp.install(quantizer, [gp.UseRule("rotation", modules="*", at="through", output=0)]):
        found, _ = gradient(lambda x: quantizer(x)[0], x, weights)
    torch.testing.assert_close(found, gp.get_rule("rotation")(weights, (x,), codes))


STE = gp.StraightThrough(modules="*")
HALF_OF_THE_SECOND = gp.Scale(0.5, modules="*", at="through", output=1)


def go_back_through(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([each.sum() for each in outputs if each.requires_grad])


def two(x):
    return torch.round(x), torch.floor(x)


@pytest.mark.parametrize(
    ("function", "policies", "factors"),
    [
        # Several outputs of one input add up.
        (two, [STE], (1, 1)),
        # Two policies through one module act on outputs of their own.
        (two, [gp.StraightThrough(modules="*", output=0), HALF_OF_THE_SECOND], (1, 0.5)),
        # Boundaries of the same module act before and after.
        (
            lambda x: (torch.round(x),),
            [STE, gp.Scale(3.0, modules="*"), gp.Clip(value=0.5, modules="*", at="output")],
            (1.5,),
        ),
    ],
)
def test_outputs_get_their_rules(function, policies, factors, as_module):
    x = torch.randn(3, requires_grad=True)
    with gp.install(layer := as_module(function), policies):
        found = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in layer(x)]
    assert [one.tolist() for one in found] == [[factor] * 3 for factor in factors]


def test_inputs_by_name():
    def first_and_second(grad, inputs, output):
        return 2.0 * grad * inputs[0], 3.0 * grad * inputs[1]

    left, right = torch.tensor([5.0], requires_grad=True), torch.tensor([7.0], requires_grad=True)
    with gp.install(loss := nn.L1Loss(), [gp.UseRule(first_and_second, modules="*", at="through")]):
        loss(target=right, input=left).backward()
    assert (left.grad, right.grad) == (10.0, 21.0)


def test_named_argument(as_module):
    layer = as_module(lambda *args, **kwargs: torch.round(args[0] + kwargs["x"]))
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with gp.install(layer, [gp.StraightThrough(modules="*", argument="x")]):
        layer(other, x=x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert other.grad is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            gp.StraightThrough(modules="quantizer"),
            r"'straightthrough': rule 'identity' at module 'quantizer', from output to input: returned"
            r" gradient 0 of shape \(\) for an input of shape \(4, 3\); name outputs",
        ),
        (
            gp.StraightThrough(modules="quantizer", output="code"),
            r"gives a Coded without an output 'code'; did you mean 'codes'",
        ),
        (gp.StraightThrough(modules="encoder", output=0), "gives one tensor without an output 0"),
        (gp.StraightThrough(modules="quantizer", output="indices"), "no floating-point output"),
        (
            gp.StraightThrough(modules="quantizer", output=0, argument="z"),
            "'quantizer'.*unknown argument 'z'.*'x'",
        ),
    ],
)
def test_errors_name_module_rule_and_shapes(policy, message):
    model = Model(Quantizer())
    with pytest.raises(gp.PolicyError, match=message), gp.install(model, [policy]):
        go_back_through(model.quantizer(model.encoder(torch.randn(4, 3))))


def test_contradictions_and_wrong_shapes(as_module):
    with pytest.raises(gp.PolicyError, match="both make the gradient through module ''"):
        gp.install(as_module(two), [STE, HALF_OF_THE_SECOND])
    policy = gp.UseRule(lambda grad, inputs, output: grad, modules="*", at="through")
    message = r"'mine': rule '<lambda>' at module '', from output to input: .* \(4, 2\) for .* \(4, 3\)"
    with gp.install(layer := nn.Linear(3, 2), {"mine": policy}), pytest.raises(gp.PolicyError, match=message):
        layer(torch.randn(4, 3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("inside", ["none", "own"])
def test_a_module_that_writes_to_its_input_is_refused(inside):
    relu, x = nn.ReLU(inplace=True), torch.ones(2, requires_grad=True)
    with (
        gp.install(relu, [gp.StraightThrough(modules="*", inside=inside)]),
        pytest.raises(gp.PolicyError, match="writes to its input in place"),
    ):
        relu(x * 1)


def test_inputs_without_gradient():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gp.install(layer, {"skip": gp.StraightThrough(modules="*")}) as installed:
        assert not layer(x).requires_grad
        with torch.no_grad():
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert installed.report().rows[0].operations_matched == 1
        installed.set_active("skip", False)
        assert layer(x).requires_grad


@pytest.mark.parametrize("inside", ["none", pytest.param("own", marks=pytest.mark.slow)])
def test_compiled_and_checkpointed(inside, compiled):
    # Where the parameters keep their own gradient, all outputs need the rule in compiled code.
    quantizer = Quantizer(Coded if inside == "none" else lambda codes, loss, _: (codes, None))
    x = torch.randn(4, 3, requires_grad=True)

    def found(call):
        codes, penalty, *_ = call(x)
        (codes.square().sum() + (0 if penalty is None else penalty)).backward()
        gradients = x.grad, quantizer.codebook.grad
        x.grad = quantizer.codebook.grad = None
        return gradients

    with gp.install(quantizer, [gp.StraightThrough(modules="*", output=0, inside=inside)]):
        expected = found(quantizer)
        assert expected[1].any()
        torch.testing.assert_close(found(compiled(quantizer)), expected)
        for reentrant in (False, True):
            again = functools.partial(checkpoint, quantizer, use_reentrant=reentrant)
            torch.testing.assert_close(found(again), expected)


@pytest.mark.parametrize(
    ("model", "call", "policy", "message"),
    [
        (
            nn.Bilinear(3, 3, 3),
            lambda model, x: model(x, 2 * x),
            STE,
            r"'it': rule 'identity' at module '', .* for 2 inputs .* others need one too; .*\(argument=…\)",
        ),
        # One tensor is query, key and value.
        (
            nn.MultiheadAttention(3, 1, batch_first=True),
            lambda model, x: model(x, x, x),
            STE,
            r"for 3 inputs .* others need one too; .*\(argument=…\)",
        ),
    ],
)
def test_one_of_several_inputs_must_be_named(model, call, policy, message):
    with gp.install(model, {"it": policy}) as installed:
        with pytest.raises(gp.PolicyError, match=message):
            go_back_through(call(model, torch.randn(2, 3, requires_grad=True)))
        installed.remove(quiet=True)
