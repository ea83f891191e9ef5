import copy
import dataclasses
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


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_a_layer_runs_forward_and_is_skipped_in_backward():
    model, x = Model(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), torch.randn(4, 3)
    expected, calls = model(x), []
    model.quantizer.register_forward_hook(lambda *_: calls.append(1))
    plain = copy.deepcopy(model)
    plain.quantizer = nn.Identity()
    with gp.install(model, [gp.StraightThrough(modules="quantizer")]):
        assert torch.equal(model(x), expected)
        assert calls == [1]
        found = gradients(model, lambda: model(x).sum())
    skipped = gradients(plain, lambda: plain(x).sum())
    assert found["quantizer.0.weight"] is None
    for name in ("encoder.weight", "encoder.bias"):
        torch.testing.assert_close(found[name], skipped[name])


class Bare:
    def __init__(self, codes, loss, indices):
        self.codes, self.loss = codes, loss


PACKS = {
    "tuple": (lambda *parts: parts, 0),
    "list": (lambda *parts: list(parts), -3),
    "dict": (lambda codes, loss, _: {"codes": codes, "loss": loss}, "codes"),
    "named tuple": (Coded, "codes"),
    "dataclass": (lambda codes, loss, _: Output(codes, loss), "codes"),
    "position in a dataclass": (lambda codes, loss, _: Output(codes, loss), 0),
    "attribute": (Bare, "codes"),
}


@pytest.mark.parametrize("kind", PACKS)
def test_the_named_output_gets_the_rule_and_the_others_keep_their_own(kind):
    pack, output = PACKS[kind]
    quantizer, x = Quantizer(pack), torch.randn(4, 3, requires_grad=True)
    weights = torch.randn(4, 3)

    def parts(result):
        if isinstance(result, dict):
            return result["codes"], result["loss"]
        return (result.codes, result.loss) if hasattr(result, "codes") else result[:2]

    codes, loss = parts(quantizer(x))
    own, own_of_codebook = torch.autograd.grad(loss, [x, quantizer.codebook])
    with gp.install(quantizer, [gp.StraightThrough(modules="*", output=output)]):
        result = quantizer(x)
        assert type(result) is type(pack(x, x, x))
        again, loss = parts(result)
        ((again * weights).sum() + loss).backward()
    assert torch.equal(again, codes)
    torch.testing.assert_close(x.grad, weights + own)
    torch.testing.assert_close(quantizer.codebook.grad, own_of_codebook)


class WithPenalty(nn.Module):
    """A layer, and a penalty of its input and its weight beside it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.linear(x).tanh()
        return hidden, hidden.square().sum() + x.exp().sum()


def test_inside_own_leaves_the_parameters_their_gradient_and_the_input_the_rule_s():
    layer, weights = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)
    x = torch.randn(4, 3, requires_grad=True)
    (plain,) = torch.autograd.grad((layer(x) * weights).sum(), layer[0].weight)
    with gp.install(layer, [gp.StraightThrough(modules=nn.Sequential, inside="own")]):
        own, found = torch.autograd.grad((layer(x) * weights).sum(), [layer[0].weight, x])
    torch.testing.assert_close(own, plain)
    torch.testing.assert_close(found, weights)


def test_inside_own_leaves_other_outputs_their_gradient_too():
    layer, weights = WithPenalty(), torch.randn(4, 3)
    x = torch.randn(4, 3, requires_grad=True)

    def loss(result):
        return (result[0] * weights).sum() + result[1]

    (plain,) = torch.autograd.grad(loss(layer(x)), layer.linear.weight)
    (of_penalty,) = torch.autograd.grad(layer(x)[1], x)
    with gp.install(layer, [gp.StraightThrough(modules=WithPenalty, output=0, inside="own")]):
        own, found = torch.autograd.grad(loss(layer(x)), [layer.linear.weight, x])
        with pytest.raises(gp.PolicyError, match="no second derivatives"):
            torch.autograd.grad(loss(layer(x)), x, create_graph=True)
    torch.testing.assert_close(own, plain)
    torch.testing.assert_close(found, weights + of_penalty)


def test_any_rule_goes_through_with_all_inputs_and_the_output():
    seen = {}

    def rule(grad, inputs, output):
        seen.update(inputs=inputs, output=output)
        return 2 * grad, 3 * grad.sum(0), None

    layer = Lambda(lambda x, shift, flags: torch.round(x + shift) * flags)
    x, shift = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    flags = torch.tensor([True, False, True])
    with gp.install(layer, [gp.UseRule(rule, modules="*", at="through")]):
        result = layer(x, shift, flags=flags)
        result.sum().backward()
    assert [tensor.shape for tensor in seen["inputs"]] == [(4, 3), (3,), (3,)]
    assert torch.equal(seen["output"], result)
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))
    assert torch.equal(shift.grad, torch.full((3,), 12.0))


def test_the_rotation_trick_across_a_quantiser_is_the_rule_s_own_formula(gradient):
    quantizer, x, weights = Quantizer(), torch.randn(4, 3), torch.randn(4, 3)
    codes = quantizer(x).codes
    with gp.install(quantizer, [gp.UseRule("rotation", modules="*", at="through", output=0)]):
        found, _ = gradient(lambda x: quantizer(x)[0], x, weights)
    torch.testing.assert_close(found, gp.get_rule("rotation")(weights, (x,), codes))


@pytest.mark.parametrize(("inside", "trains"), [("none", False), ("own", True)])
def test_a_stop_through_a_module_cuts_the_input_off(inside, trains):
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    with gp.install(layer, [gp.Stop(modules="*", at="through", inside=inside)]):
        (layer(x).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones(4, 3))
    assert (layer.weight.grad is not None) == trains


def test_as_many_outputs_as_inputs_of_the_same_shapes_belong_to_each_other():
    layer = Lambda(lambda tree: {key: torch.round(value) for key, value in tree.items()})
    tree = {"a": torch.randn(2, requires_grad=True), "b": torch.randn(3, requires_grad=True)}
    with gp.install(layer, [gp.StraightThrough(modules="*")]):
        result = layer(tree)
        (2 * result["a"].sum() + 3 * result["b"].sum()).backward()
    assert torch.equal(tree["a"].grad, torch.full((2,), 2.0))
    assert torch.equal(tree["b"].grad, torch.full((3,), 3.0))


def test_several_outputs_of_one_input_add_up(gradient):
    layer = Lambda(lambda x: (torch.round(x), torch.floor(x)))
    with gp.install(layer, [gp.StraightThrough(modules="*")]):
        found, _ = gradient(lambda x: sum(layer(x)), torch.randn(3))
    assert torch.equal(found, torch.full((3,), 2.0))


def test_inputs_are_in_the_order_of_the_parameters_in_whichever_order_a_call_names_them():
    class Round(nn.Module):
        def forward(self, x, noise):
            return (x + noise).round()

    x, noise = torch.randn(2, requires_grad=True), torch.randn(2)
    with gp.install(layer := Round(), [gp.StraightThrough(modules=Round)]):
        layer(noise=noise, x=x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_rule_gets_two_inputs_by_name_in_the_order_of_the_parameters():
    class Difference(nn.Module):
        def forward(self, left, right):
            return left - right

    def first_and_second(grad, inputs, output):
        return 2.0 * grad * inputs[0], 3.0 * grad * inputs[1]

    left, right = torch.tensor([5.0], requires_grad=True), torch.tensor([7.0], requires_grad=True)
    with gp.install(model := Difference(), [gp.UseRule(first_and_second, modules="*", at="through")]):
        model(right=right, left=left).backward()
    assert (left.grad, right.grad) == (10.0, 21.0)


def test_one_argument_may_be_named_that_gets_the_gradient():
    layer = Lambda(lambda *args, **kwargs: torch.round(args[0] + kwargs["x"]))
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
            r"'straightthrough': module 'quantizer': rule 'identity' passes"
            r" a gradient of shape \(\) on to an input of shape \(4, 3\); name the outputs",
        ),
        (
            gp.StraightThrough(modules="quantizer", output="code"),
            r"gives a Coded without an output 'code'; did you mean 'codes'",
        ),
        (gp.StraightThrough(modules="quantizer", output=7), "without an output 7"),
        (
            gp.StraightThrough(modules="encoder", output=0),
            "module 'encoder': gives one tensor without an output 0",
        ),
        (gp.StraightThrough(modules="quantizer", output="indices"), "no floating-point output"),
        (
            gp.StraightThrough(modules="quantizer", output=0, argument="z"),
            "'quantizer'.*unknown argument 'z'.*'x'",
        ),
    ],
)
def test_what_does_not_fit_names_module_rule_and_shapes(policy, message):
    model = Model(Quantizer())
    with pytest.raises(gp.PolicyError, match=message), gp.install(model, [policy]):
        model.quantizer(model.encoder(torch.randn(4, 3)))


def test_a_rule_that_gives_another_shape_is_refused_in_backward():
    layer = nn.Linear(3, 2)
    policy = gp.UseRule(lambda grad, inputs, output: grad, modules="*", at="through")
    with (
        gp.install(layer, {"mine": policy}),
        pytest.raises(
            gp.PolicyError,
            match=r"'mine': rule '<lambda>' at module '', from output to input: .*"
            r"\(4, 2\) for an input of shape \(4, 3\)",
        ),
    ):
        layer(torch.randn(4, 3, requires_grad=True)).sum().backward()


def test_two_policies_through_one_module_need_outputs_of_their_own(gradient):
    layer = Lambda(lambda x: (torch.round(x), torch.floor(x)))
    half = gp.Scale(0.5, modules="*", at="through", output=1)
    with gp.install(layer, [gp.StraightThrough(modules="*", output=0), half]):
        found, _ = gradient(lambda x: sum(layer(x)), torch.randn(3))
    assert torch.equal(found, torch.full((3,), 1.5))
    with pytest.raises(gp.PolicyError, match="both make the gradient through module ''"):
        gp.install(layer, [gp.StraightThrough(modules="*"), half])


def test_boundaries_of_the_same_module_act_before_and_after(gradient):
    policies = [
        gp.StraightThrough(modules="*"),
        gp.Scale(3.0, modules="*"),
        gp.Clip(value=0.5, modules="*", at="output"),
    ]
    with gp.install(layer := Lambda(torch.round), policies):
        found, _ = gradient(layer, torch.randn(3))
    assert torch.equal(found, torch.full((3,), 1.5))


def test_a_module_that_writes_to_its_input(gradient):
    relu = nn.ReLU(inplace=True)

    def residual(x):
        work = x * 1
        return 10 * relu(work) + work

    x = torch.tensor([-1.0, 2.0])
    with gp.install(relu, [gp.StraightThrough(modules="*")]):
        found, value = gradient(residual, x)
    assert torch.equal(value, torch.tensor([0.0, 22.0]))
    assert torch.equal(found, torch.tensor([10.0, 11.0]))
    with (
        gp.install(relu, [gp.StraightThrough(modules="*", inside="own")]),
        pytest.raises(gp.PolicyError, match="writes to its input in place"),
    ):
        gradient(residual, x)


def test_an_input_without_gradient_and_a_time_without_gradients_change_nothing():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gp.install(layer, {"skip": gp.StraightThrough(modules="*")}) as installed:
        assert not layer(x).requires_grad
        with torch.no_grad():
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert installed.report().rows[0].operations_matched == 1
        installed.set_active("skip", False)
        assert layer(x).requires_grad


def test_the_only_path_that_is_cut_is_named():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with (
        pytest.raises(gp.PolicyError, match=r"'skip'.* cuts the only path"),
        gp.install(model, {"skip": gp.StraightThrough(modules="0")}),
    ):
        model(x).sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inside", ["none", "own"])
def test_compiled_whole(backend, inside):
    model, x = Model(nn.Sequential(nn.Linear(3, 3), Lambda(torch.round))), torch.randn(4, 3)
    policy = gp.UseRule("hardtanh", modules="quantizer", at="through", inside=inside)
    with gp.install(model, [policy]):
        expected = gradients(model, lambda: model(x).square().sum())
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        found = gradients(model, lambda: compiled(x).square().sum())
    assert (found["quantizer.0.weight"] is None) == (inside == "none")
    torch.testing.assert_close(found, expected)


def test_compiled_with_other_outputs():
    quantizer, x = Quantizer(), torch.randn(4, 3, requires_grad=True)

    def loss(call):
        codes, penalty, _ = call(x)
        return codes.square().sum() + penalty

    with gp.install(quantizer, [gp.StraightThrough(modules="*", output="codes")]):
        expected = torch.autograd.grad(loss(quantizer), [x, quantizer.codebook])
        compiled = torch.compile(quantizer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(torch.autograd.grad(loss(compiled), [x, quantizer.codebook]), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant):
    model, x = Model(nn.Sequential(nn.Linear(3, 3), Lambda(torch.round))), torch.randn(4, 3)
    with gp.install(model, [gp.UseRule("tanh", modules="quantizer", at="through", inside="own")]):
        expected = gradients(model, lambda: model(x).square().sum())

        def rerun():
            hidden = model.encoder(x)
            hidden = checkpoint(model.quantizer, hidden, use_reentrant=use_reentrant)
            return model.decoder(hidden).square().sum()

        torch.testing.assert_close(gradients(model, rerun), expected)


def test_under_func_transforms():
    model, x = Model(Lambda(torch.round)), torch.randn(3)
    with gp.install(model, [gp.StraightThrough(modules="quantizer")]):
        each = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x[None])[0]
    torch.testing.assert_close(each, model.encoder.weight.T @ model.decoder.weight.sum(0))


def test_a_copied_model_goes_through_its_own_module():
    model, x = Model(Quantizer()), torch.randn(4, 3)
    model.decoder = nn.Identity()
    with gp.install(model, [gp.StraightThrough(modules="quantizer", output="codes")]):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.quantizer.codebook.fill_(7.0)
        assert (other(x).codes == 7.0).all()
        assert not (model(x).codes == 7.0).any()
        other(x).codes.sum().backward()
        assert other.encoder.weight.grad is not None


class Attends(nn.Module):
    """Attention over one tensor, which is query, key and value."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_a_rule_for_one_input_is_refused_where_several_need_a_gradient():
    x, other = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    with (
        gp.install(layer := Lambda(torch.add), {"ste": gp.StraightThrough(modules="*")}),
        pytest.raises(gp.PolicyError, match=r"'ste': module '': rule 'identity' .* 2 need one; .*argument=…"),
    ):
        layer(x, other)


def test_a_forward_of_any_number_of_arguments_asks_for_a_position():
    class Joins(nn.Module):
        def forward(self, *parts):
            return sum(parts)

    x = torch.ones(2, requires_grad=True)
    with (
        gp.install(model := Joins(), [gp.StraightThrough(modules="")]),
        pytest.raises(gp.PolicyError, match=r"its forward takes \*parts: give a position\)"),
    ):
        model(x, x * 2)


def test_attention_over_one_tensor_asks_which_argument_is_meant():
    x = torch.randn(2, 3, 4, requires_grad=True)
    with (
        gp.install(model := Attends(), [gp.StraightThrough(modules="attention")]),
        pytest.raises(
            gp.PolicyError, match=r"3 need one; .*\(argument=…, its forward takes query, key, value"
        ),
    ):
        model(x)
    with gp.install(model, [gp.StraightThrough(modules="attention", argument="value", output=0)]):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3, 4))


def test_a_surrogate_for_one_input_is_refused_where_several_need_a_gradient():
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with (
        gp.install(layer := Lambda(torch.add), [gp.StraightThrough("tanh", modules="*")]),
        pytest.raises(gp.PolicyError, match=r"name the input that the gradient is for \(argument=…\)"),
    ):
        layer(x, other).sum().backward()
