"""The rules of quantisers give the values and gradients of published code, written anew from its formulas."""

import pytest
import torch
from torch.autograd import Function, grad

import gradpolicy as gp


def scaled_gradient(x, factor):
    return x * factor + (x - x * factor).detach()


def lsq(values, step, lowest=0, highest=15):
    """Appendix A of the paper, in pseudocode there; as zhutmost/lsq-net, quan/quantizer/lsq.py."""
    scaled = scaled_gradient(step, 1 / (values.numel() * highest) ** 0.5)
    bounded = (values / scaled).clamp(lowest, highest)
    return (bounded + (bounded.round() - bounded).detach()) * scaled


def lsq_plus(values, step, offset):
    """Equations 3 to 6 of the paper; as ZouJiu1/LSQplus, whose offset's gradient is scaled as the step's."""
    shift = scaled_gradient(offset, 1 / (values.numel() * 15) ** 0.5)
    return lsq(values - shift, step) + shift


class PACT(Function):
    """The clip's gradient of the paper's section 3; as KwangHoonAn/PACT, module.py."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x, alpha)
        return (x.clamp(0, alpha.item()) * 15 / alpha).round() / (15 / alpha)

    @staticmethod
    def backward(ctx, incoming):
        x, alpha = ctx.saved_tensors
        return incoming * ~((x < 0) | (x > alpha)), (incoming * (x >= alpha)).sum()


@pytest.mark.parametrize(
    ("rule", "published", "learned"),
    [
        (gp.get_rule("lsq", bits=3), lambda v, s: lsq(v, s, -4, 3), [0.31]),
        (gp.get_rule("lsq", bits=4, signed=False), lsq, [0.13]),
        (gp.get_rule("lsq_plus", bits=4), lsq_plus, [0.16, -0.4]),
        (gp.get_rule("pact"), PACT.apply, [1.7]),
    ],
    ids=["lsq", "lsq_unsigned", "lsq_plus", "pact"],
)
def test_values_and_gradients_are_as_published(rule, published, learned):
    generator = torch.Generator().manual_seed(3)
    inputs = [2 * torch.randn(40, generator=generator), *map(torch.tensor, learned)]
    inputs = [each.double().requires_grad_() for each in inputs]
    incoming = torch.linspace(-1, 2, 40, dtype=torch.float64)
    expected = published(*inputs)
    found = gp.apply(rule, lambda *tensors: published(*tensors).detach(), *inputs)
    ours, theirs = ((y, *grad(y, inputs, incoming)) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert all(gradient.abs().sum() > 0 for gradient in ours)
