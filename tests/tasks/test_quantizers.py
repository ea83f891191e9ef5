"""Quantised layers give the papers' values, and under their policies the gradients of published code."""

import functools

import pytest
import torch
from torch import nn
from torch.autograd import Function, grad
from torch.nn.utils.parametrize import register_parametrization

import gradpolicy as gp
from gradpolicy.tasks.models import MultilayerPerceptron, QuantizedReLU
from gradpolicy.tasks.quantizers import LSQ, PACT, DoReFaWeight, LSQPlus, Quantized, quantize

QUANTIZE = "gradpolicy.tasks.quantizers.quantize"
CLIP = "gradpolicy.tasks.quantizers.clip_and_quantize"
WEIGHTS, ACTIVATIONS = "*.parametrizations.*", ["*", "!*.parametrizations.*"]


def on(rule: str, modules: str | list[str], **parameters: object) -> gp.UseRule:
    return gp.UseRule(rule, parameters={"bits": 4, **parameters}, ops=[QUANTIZE], modules=modules)


POLICIES = {
    "dorefa": [gp.StraightThrough(ops=["round"])],
    "pact": [gp.StraightThrough(ops=["round"], modules=WEIGHTS), gp.UseRule("pact", ops=[CLIP])],
    "lsq": [on("lsq", WEIGHTS), on("lsq", ACTIVATIONS, signed=False)],
    "lsq_plus": [on("lsq", WEIGHTS), on("lsq_plus", ACTIVATIONS)],
}
LAYERS = {
    "dorefa": (DoReFaWeight, lambda: QuantizedReLU(15)),
    "pact": (DoReFaWeight, lambda: PACT(4)),
    "lsq": (LSQ, lambda: LSQ(4, signed=False)),
    "lsq_plus": (LSQ, lambda: LSQPlus(4)),
}


@pytest.fixture
def values():
    generator = torch.Generator().manual_seed(3)
    return (2 * torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()


@pytest.fixture
def incoming():
    return torch.linspace(-1, 2, 40, dtype=torch.float64)


# ---- what the papers' repositories compute, written anew from their formulas


def passed_round(x):
    """A round whose derivative is 1."""
    return x + (x.round() - x).detach()


def scaled_gradient(x, factor):
    return x * factor + (x - x * factor).detach()


def published_dorefa(weight, bits):
    """Equation 9 of the paper, with its quantize_k; as tensorpack/examples/DoReFa-Net/dorefa.py."""
    count = 2**bits - 1
    unit = weight.tanh() / weight.tanh().abs().max() * 0.5 + 0.5
    return 2 * passed_round(unit * count) / count - 1


class PublishedPACT(Function):
    """The clip's gradient of the paper's section 3; as KwangHoonAn/PACT, module.py."""

    @staticmethod
    def forward(ctx, x, alpha, bits):
        ctx.save_for_backward(x, alpha)
        scale = (2**bits - 1) / alpha
        return (x.clamp(0, alpha.item()) * scale).round() / scale

    @staticmethod
    def backward(ctx, incoming):
        x, alpha = ctx.saved_tensors
        dropped = (x < 0) | (x > alpha)
        return incoming * ~dropped, (incoming * (x >= alpha)).sum(), None


def published_pact(x, alpha, bits):
    return PublishedPACT.apply(x, alpha, bits)


def published_lsq(values, step, lowest, highest):
    """Appendix A of the paper, in pseudocode there; as zhutmost/lsq-net, quan/quantizer/lsq.py."""
    scaled = scaled_gradient(step, 1 / (values.numel() * highest) ** 0.5)
    return passed_round((values / scaled).clamp(lowest, highest)) * scaled


def published_lsq_plus(values, step, offset, highest):
    """Equations 3 to 6 of the paper; as ZouJiu1/LSQplus, whose offset's gradient is scaled as the step's."""
    factor = 1 / (values.numel() * highest) ** 0.5
    scaled, shift = scaled_gradient(step, factor), scaled_gradient(offset, factor)
    return passed_round(((values - shift) / scaled).clamp(0, highest)) * scaled + shift


def uses(rule, **parameters):
    return gp.UseRule(rule, parameters=parameters, ops=[QUANTIZE])


def with_step(module, step):
    with torch.no_grad():
        module.step.fill_(step)
    return module


def dorefa(bits):
    return DoReFaWeight(bits), POLICIES["dorefa"][0], functools.partial(published_dorefa, bits=bits)


def pact(bits):
    published = functools.partial(published_pact, bits=bits)
    return PACT(bits, clip=1.7), gp.UseRule("pact", ops=[CLIP]), published


def lsq(bits, signed, step, lowest, highest):
    published = functools.partial(published_lsq, lowest=lowest, highest=highest)
    return with_step(LSQ(bits, signed), step), uses("lsq", bits=bits, signed=signed), published


def lsq_plus(bits):
    published = functools.partial(published_lsq_plus, highest=2**bits - 1)
    return LSQPlus(bits, low=-0.4, high=2.0), uses("lsq_plus", bits=bits), published


@pytest.mark.parametrize(
    ("module", "policy", "published"),
    [
        *(make(bits) for make in (dorefa, pact, lsq_plus) for bits in (2, 4)),
        lsq(3, True, 0.31, -4, 3),
        lsq(4, False, 0.13, 0, 15),
    ],
)
def test_values_and_gradients_are_as_published(values, incoming, module, policy, published):
    learned = list(module.double().parameters())
    expected = published(values, *learned)
    with gp.install(nn.Sequential(module), [policy]):
        found = module(values)
    ours, theirs = ((y, *grad(y, [values, *learned], incoming)) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert all(gradient.abs().sum() > 0 for gradient in ours)


# ---- layers in models


def test_weights_are_quantised_by_parametrize_and_the_step_starts_from_them():
    layer = nn.Linear(6, 5)
    before = layer.weight.detach().clone()
    register_parametrization(layer, "weight", LSQ(3))
    (quantizer,) = layer.parametrizations.weight
    assert quantizer.step.item() == pytest.approx(2 * float(before.abs().mean()) / 3**0.5)
    assert torch.equal(layer.parametrizations.weight.original, before)
    points = (layer.weight / quantizer.step).detach()
    torch.testing.assert_close(points, points.round())
    assert points.min() >= -4
    assert points.max() <= 3


@pytest.mark.parametrize("name", LAYERS)
def test_without_its_policy_nothing_before_a_quantiser_learns(name):
    model = Quantized(MultilayerPerceptron(8, [6], 3), *LAYERS[name])
    inputs = torch.randn(5, 8)

    def learns():
        model.zero_grad()
        model(inputs).square().sum().backward()
        return {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}

    originals = {key for key, _ in model.named_parameters() if key.endswith("original")}
    assert len(originals) == 2
    assert not originals & learns()
    with gp.install(model, POLICIES[name], strict=True):
        assert learns() == dict(model.named_parameters()).keys() - {
            key for key, _ in model.named_parameters() if key.endswith("clip")
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layers_have_the_same_gradients(name):
    inputs = torch.rand(16, 64)

    def gradients(backend):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Quantized(MultilayerPerceptron(64, [32], 10), *LAYERS[name])
        model(inputs)
        with gp.install(model, POLICIES[name], strict=True):
            run = model if backend is None else torch.compile(model, backend=backend)
            run(inputs).square().mean().backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients(None)
    assert expected
    torch.testing.assert_close(gradients("aot_eager"), expected)


def test_layers_to_keep_are_named_by_globs():
    model = Quantized(
        MultilayerPerceptron(8, [6, 5], 3, normalize=True), *LAYERS["lsq"], keep=["*.0.0", "head"]
    )
    kept = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert kept == {"model.trunk.0.0", "model.head"}
    with pytest.raises(gp.PolicyError, match="did you mean 'head'"):
        Quantized(MultilayerPerceptron(8, [6], 3), *LAYERS["lsq"], keep=["haed"])


@pytest.mark.parametrize("make", [DoReFaWeight, LSQ])
def test_one_bit_is_refused_where_no_point_would_be_left(make):
    with pytest.raises(gp.PolicyError, match=rf"{make.__name__}\.bits: must be .* at least 2"):
        make(1)


def test_an_operation_of_ones_own_goes_by_its_dotted_path():
    v = torch.tensor([0.3, 9.0], requires_grad=True)
    with gp.gradient_override({QUANTIZE: gp.get_rule("lsq", bits=4)}):
        quantize(v, torch.tensor(1.0), -8, 7).sum().backward()
    assert v.grad.tolist() == [1.0, 0.0]
    for wrong, message in (("quantise", "did you mean 'quantize'"), ("QuantizedReLU", "QuantizedReLU")):
        with pytest.raises(gp.PolicyError, match=message):
            gp.gradient_override({f"gradpolicy.tasks.quantizers.{wrong}": "lsq"})
