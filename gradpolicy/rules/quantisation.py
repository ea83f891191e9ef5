"""Rules for quantisers that learn a grid or a codebook."""

import math
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Inputs, rule
from gradpolicy.rules.routing import first_input, to_first


@rule("lsq")
def lsq(
    grad: Tensor,
    inputs: Inputs,
    output: Tensor,
    *,
    bits: int = 8,
    signed: bool = True,
    count: int | None = None,
) -> Any:
    r"""Learn the step size of a quantiser: straight-through for the values, a scaled gradient for the step.

    ======================================== ===========================================================
    forward                                  backward
    ======================================== ===========================================================
    ``y = round(clamp(v / s, −Qₙ, Qₚ)) · s`` ``grad_v = 1[−Qₙ < v/s < Qₚ] · grad_y``
    \                                        ``grad_s = Σ d · grad_y / √(count · Qₚ)`` with
    \                                        ``d = round(v/s) − v/s`` inside, ``−Qₙ`` below, ``Qₚ`` above
    ======================================== ===========================================================

    Signed: ``Qₙ = 2ᵇ⁻¹``, ``Qₚ = 2ᵇ⁻¹ − 1``; unsigned: ``Qₙ = 0``, ``Qₚ = 2ᵇ − 1``.

    Args:
        grad: Gradient at the quantised values.
        inputs: ``(v, s)``, the values and the step (above 0; one for all, or any shape that broadcasts to v,
            such as one per channel).
        output: The quantised values.
        bits: b, the width of the grid; at least 2 where signed, else 1.
        signed: True if the grid has negative points.
        count: The number of values per step, for the gradient's scale; by default that of v. For
            activations the paper uses the number of features of one sample.

    Raises:
        PolicyError: Unless there are two inputs, and at least one positive point on the grid.

    Source: Esser et al. 2020, arXiv:1902.08153.

    Example:
        >>> import gradpolicy as gp
        >>> def quantise(v, s):
        ...     return torch.round(torch.clamp(v / s, -8, 7)) * s
        >>> v, s = torch.tensor([0.3, 9.0], requires_grad=True), torch.tensor(1.0, requires_grad=True)
        >>> gp.apply(gp.get_rule("lsq", bits=4), quantise, v, s).sum().backward()
        >>> v.grad, s.grad
        (tensor([1., 0.]), tensor(1.7907))
    """
    _check_inputs("lsq", inputs, "values", "step")
    values, step = inputs
    return _through_grid("lsq", grad, (values, step, torch.zeros_like(step)), bits, signed, count)[:2]


@rule("lsq_plus")
def lsq_plus(
    grad: Tensor,
    inputs: Inputs,
    output: Tensor,
    *,
    bits: int = 8,
    signed: bool = False,
    count: int | None = None,
) -> Any:
    r"""Learn the step and the offset of a quantiser: ``lsq`` with a gradient for the offset of the grid.

    ================================================== ==================================================
    forward                                            backward
    ================================================== ==================================================
    ``y = round(clamp((v − β) / s, −Qₙ, Qₚ)) · s + β`` ``grad_v = 1[−Qₙ < (v − β)/s < Qₚ] · grad_y``
    \                                                  ``grad_s = Σ d · grad_y / √(count · Qₚ)``, d as
    \                                                  in ``lsq`` with ``(v − β)/s`` for ``v/s``
    \                                                  ``grad_β = Σ_outside grad_y / √(count · Qₚ)``
    ================================================== ==================================================

    Args:
        grad: Gradient at the quantised values.
        inputs: ``(v, s, β)``, the values, the step and the offset (one for all, or any shapes that broadcast
            to v).
        output: The quantised values.
        bits: b, the width of the grid.
        signed: As in ``lsq``; unsigned: ``Qₙ = 0``, ``Qₚ = 2ᵇ − 1``.
        count: As in ``lsq``.

    Raises:
        PolicyError: Unless there are three inputs, and at least one positive point on the grid.

    Source: Bhalgat et al. 2020, arXiv:2004.09576. Both gradients are scaled as the step's is in LSQ.

    Example:
        >>> import gradpolicy as gp
        >>> def quantise(v, s, b):
        ...     return torch.round(torch.clamp((v - b) / s, 0, 15)) * s + b
        >>> v = torch.tensor([-1.0, 0.3, 99.0], requires_grad=True)
        >>> s, b = (torch.tensor(number, requires_grad=True) for number in (1.0, -0.5))
        >>> gp.apply(gp.get_rule("lsq_plus", bits=4), quantise, v, s, b).sum().backward()
        >>> v.grad, s.grad, b.grad
        (tensor([0., 1., 0.]), tensor(2.2659), tensor(0.2981))
    """
    _check_inputs("lsq_plus", inputs, "values", "step", "offset")
    return _through_grid("lsq_plus", grad, inputs, bits, signed, count)


@rule("pact")
def pact(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    r"""Learn a clipping bound: straight-through inside, the gradient of clipped values for the bound.

    ================================================== ================================================
    forward                                            backward
    ================================================== ================================================
    ``y = round(clamp(x, 0, α) · n / α) · α / n``,     ``grad_x = 1[0 ≤ x ≤ α] · grad_y``
    ``n = 2ᵇ − 1``                                     ``grad_α = Σ 1[x ≥ α] · grad_y``
    ================================================== ================================================

    Args:
        grad: Gradient at the quantised values.
        inputs: ``(x, α)``, the values and the clip (above 0; one for all, or any shape that broadcasts to x).
        output: The quantised values.

    Raises:
        PolicyError: Unless there are two inputs.

    Source: Choi et al. 2018, arXiv:1805.06085. (Its α is regularised too: give it weight decay.)

    Example:
        >>> import gradpolicy as gp
        >>> def quantise(x, clip):
        ...     return torch.round(torch.minimum(x.relu(), clip) * 15 / clip) * clip / 15
        >>> x = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
        >>> clip = torch.tensor(1.0, requires_grad=True)
        >>> gp.apply("pact", quantise, x, clip).sum().backward()
        >>> x.grad, clip.grad
        (tensor([0., 1., 0.]), tensor(1.))
    """
    _check_inputs("pact", inputs, "values", "clip")
    values, clip = inputs
    zeros = torch.zeros_like(grad)
    grad_clip = torch.where(values >= clip, grad, zeros).sum_to_size(clip.shape)
    return torch.where((values >= 0) & (values <= clip), grad, zeros), grad_clip


@rule("rotation")
def rotation(grad: Tensor, inputs: Inputs, output: Tensor, *, dim: int = -1) -> Any:
    r"""Rotate and scale the gradient as the vector is rotated and scaled onto its code (rotation trick).

    ====================================== ==========================================================
    forward                                backward
    ====================================== ==========================================================
    ``q`` = the codebook vector nearest    ``grad_e = λ Rᵀ grad_q`` with ``λ = ‖q‖ / ‖e‖`` and R the
    to the vector ``e``                    rotation in the plane of e and q with ``λ R e = q``:
    \                                      ``Rᵀ g = g − 2 r (r·g) + 2 ê (q̂·g)``, ``r = (ê+q̂)/‖ê+q̂‖``
    ====================================== ==========================================================

    The angle between the gradient and q is preserved, so vectors on either side of a codebook vector get
    different gradients, while the straight-through gradient is the same for all. A vector of length 0 has no
    direction: its gradient passes unchanged.

    Args:
        grad: Gradient at the quantised vectors.
        inputs: ``(e,)`` or ``(e, codebook)``, the vectors first; the codebook gets no gradient (train it by
            its own loss or moving average).
        output: q, the quantised vectors.
        dim: The dimension of the vectors' entries.

    Source: Fifty et al. 2024, arXiv:2410.06424.

    Example:
        >>> import gradpolicy as gp
        >>> def nearest(e, codebook):
        ...     return codebook[torch.cdist(e, codebook).argmin(-1)]
        >>> e = torch.tensor([[1.0, 0.0]], requires_grad=True)
        >>> q = gp.apply("rotation", nearest, e, torch.tensor([[0.0, 2.0]]))
        >>> (q * torch.tensor([0.0, 1.0])).sum().backward()
        >>> e.grad.round(decimals=3)
        tensor([[2., 0.]])
    """
    vectors, codes = first_input(inputs), output
    length = torch.linalg.vector_norm(vectors, dim=dim, keepdim=True)
    code_length = torch.linalg.vector_norm(codes, dim=dim, keepdim=True)
    direction, code_direction = _divide(vectors, length), _divide(codes, code_length)
    between = direction + code_direction
    between = _divide(between, torch.linalg.vector_norm(between, dim=dim, keepdim=True))
    rotated = (
        grad
        - 2 * between * (between * grad).sum(dim, keepdim=True)
        + 2 * direction * (code_direction * grad).sum(dim, keepdim=True)
    )
    gradient = to_first(torch.where(length > 0, rotated * _divide(code_length, length), grad), inputs)
    return (gradient, *[None] * (len(inputs) - 1)) if len(inputs) > 1 else gradient


def _divide(numerator: Tensor, length: Tensor) -> Tensor:
    """Divide by a length; divide by 1 if it is 0."""
    return numerator / torch.where(length > 0, length, 1.0)


def _check_inputs(name: str, inputs: Inputs, *expected: str) -> None:
    if len(inputs) != len(expected):
        raise PolicyError(f"rule {name!r}: expects the inputs ({', '.join(expected)}), got {len(inputs)}")


def _through_grid(
    name: str, grad: Tensor, inputs: Inputs, bits: int, signed: bool, count: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the values, the step and the offset of a quantiser."""
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if highest < 1:
        raise PolicyError(
            f"rule {name!r}: bits={bits} leaves no positive point; signed grids need at least 2"
        )
    values, step, offset = inputs
    scaled = (values - offset) / step
    inside = (scaled > lowest) & (scaled < highest)
    by_step = grad * torch.where(inside, scaled.round() - scaled, scaled.clamp(lowest, highest))
    outside = torch.where(inside, torch.zeros_like(grad), grad)

    def shared(gradient: Tensor, number: Tensor) -> Tensor:
        sharing = max(1, values.numel() // max(1, number.numel())) if count is None else count
        return gradient.sum_to_size(number.shape) / math.sqrt(sharing * highest)

    return torch.where(inside, grad, torch.zeros_like(grad)), shared(by_step, step), shared(outside, offset)
