"""Rules for samples of discrete variables: bits, and one-hot vectors of categories.

A sample has no gradient with respect to the probabilities it was drawn from, but its *expectation* has one.
These rules estimate that gradient from one sample.
"""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Inputs, rule
from gradpolicy.rules.routing import Number, check_above_zero, first_input, on_device_of, to_first


@rule("bernoulli")
def bernoulli(grad: Tensor, inputs: Inputs, output: Tensor, *, slope: Number = 1.0) -> Any:
    """Pass the gradient straight through random bits, with slope annealing.

    ============================= ==============================================================
    forward                       backward
    ============================= ==============================================================
    ``y ~ Bernoulli(p)``          ``grad_p = dq/dp · grad_y`` with
                                  ``q = pᵃ / (pᵃ + (1−p)ᵃ) = σ(a · logit p)`` and ``a = slope``
    ============================= ==============================================================

    With a slope of 1, ``q = p`` and the gradient passes unchanged. If the slope rises during training, q
    approaches a step, and the gradient concentrates near ``p = 1/2``: use a schedule such as
    ``gp.schedules.Linear(1, 5, steps=10_000)``. The estimate is unbiased if the loss is linear in y.

    Args:
        grad: Gradient at the sample.
        inputs: ``(p,)``, the probabilities, as ``torch.bernoulli`` takes them.
        output: The sample.
        slope: a, at least 1.

    Source: Bengio, Léonard, Courville 2013, arXiv:1308.3432; slope annealing: Chung, Ahn, Bengio 2017,
    arXiv:1609.01704.

    Example:
        >>> import gradpolicy as gp
        >>> p = torch.tensor([0.1, 0.5], requires_grad=True)
        >>> with gp.gradient_override({"bernoulli": gp.get_rule("bernoulli", slope=3.0)}):
        ...     torch.bernoulli(p).sum().backward()
        >>> p.grad
        tensor([0.0456, 3.0000])
    """
    slope = on_device_of(slope, grad)
    probabilities = first_input(inputs)
    large = torch.maximum(probabilities, 1 - probabilities)
    # dq/dp in the ratio of the smaller probability to the larger, which neither over- nor underflows.
    ratio = (1 - large) / large
    steepness = slope * ratio ** (slope - 1) / (large * (1 + ratio**slope)).square()
    return to_first(grad * steepness, inputs)


@rule("gumbel")
def gumbel(grad: Tensor, inputs: Inputs, output: Tensor, *, temperature: Number = 1.0, dim: int = -1) -> Any:
    """Use the gradient of a softmax at a temperature for one-hot samples: straight-through Gumbel-softmax.

    ======================================= ==================================================
    forward                                 backward
    ======================================= ==================================================
    ``y = one_hot(argmax(z))``,             ``s = softmax(z / temperature)``,
    ``z = logits + Gumbel noise``           ``grad_z = s · (grad_y − Σ s · grad_y) / temperature``
    ======================================= ==================================================

    Args:
        grad: Gradient at the one-hot vectors.
        inputs: ``(z,)``, logits to which the noise has been added (without noise: a straight-through argmax).
        output: The one-hot vectors.
        temperature: Lower: less bias, more variance.
        dim: The dimension of the categories.

    Source: Jang, Gu, Poole 2017, arXiv:1611.01144; Maddison, Mnih, Teh 2017, arXiv:1611.00712.

    Example:
        >>> import gradpolicy as gp
        >>> def largest(z):
        ...     return torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).to(z.dtype)
        >>> logits = torch.zeros(3, requires_grad=True)
        >>> noise = -torch.empty(3).exponential_().log()
        >>> y = gp.apply(gp.get_rule("gumbel", temperature=0.5), largest, logits + noise)
        >>> y.sum()
        tensor(1., grad_fn=<SumBackward0>)
    """
    check_above_zero("gumbel", "temperature", temperature)
    temperature = on_device_of(temperature, grad)
    shares = torch.softmax(first_input(inputs) / temperature, dim)
    return to_first(_centred(grad, shares, dim) / temperature, inputs)


@rule("reinmax")
def reinmax(grad: Tensor, inputs: Inputs, output: Tensor, *, temperature: Number = 1.0, dim: int = -1) -> Any:
    """Use a second-order accurate straight-through gradient for categorical samples: ReinMax.

    =================================== =========================================================
    forward                             backward
    =================================== =========================================================
    ``y ~ Categorical(softmax(x))``,    ``grad_x = 2 J(π₁) grad_y − ½ J(π₀) grad_y`` with
    one-hot                             ``π₀ = softmax(x)``, ``π₁ = (softmax(x / temperature) + y) / 2``,
                                        ``J(π) g = π · (g − Σ π · g)``
    =================================== =========================================================

    The plain straight-through gradient is ``J(π₀) grad_y``, exact in expectation for a loss linear in y;
    this one (temperature 1) is exact for a quadratic loss too.

    Args:
        grad: Gradient at the one-hot vectors.
        inputs: ``(x,)``, the logits that the sample was drawn from, without noise.
        output: The one-hot sample.
        temperature: Smooths π₁; 1 and above.
        dim: The dimension of the categories.

    Source: Liu, Dong, Liu, Yu, Gao 2023, arXiv:2304.08612.

    Example:
        >>> import gradpolicy as gp
        >>> def draw(x):
        ...     return torch.distributions.OneHotCategorical(logits=x).sample()
        >>> logits = torch.zeros(3, requires_grad=True)
        >>> (gp.apply("reinmax", draw, logits) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        >>> bool(logits.grad.sum().abs() < 1e-6)
        True
    """
    check_above_zero("reinmax", "temperature", temperature)
    logits = first_input(inputs)
    probabilities = torch.softmax(logits, dim)
    smoothed = torch.softmax(logits / on_device_of(temperature, grad), dim)
    midpoint = (smoothed + output) / 2
    return to_first(2 * _centred(grad, midpoint, dim) - _centred(grad, probabilities, dim) / 2, inputs)


def _centred(grad: Tensor, probabilities: Tensor, dim: int) -> Tensor:
    """Return ``J(π) g = π · (g − Σ π · g)``, the gradient through the softmax with these probabilities."""
    weighted = probabilities * grad
    return weighted - probabilities * weighted.sum(dim, keepdim=True)
