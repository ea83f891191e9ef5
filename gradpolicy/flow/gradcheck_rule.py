"""``gradcheck_rule``: comparison of a rule with the true gradient.

The true gradient is computed by central differences here, since torch has no public numerical Jacobian
(``torch.autograd.gradcheck`` returns only a bool), and since kinks must be detected.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import vjp

from gradpolicy.errors import PolicyError
from gradpolicy.flow.apply import apply, replacing_rule
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.rules.registry import Rule, RuleFunction

# The largest deviation that counts as exact, by the precision of the forward.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
COARSE = 1e-1
# The number of random incoming gradients.
COTANGENTS = 4


@dataclass(frozen=True)
class RuleCheck:
    """The result of :func:`gradcheck_rule`, over all inputs together.

    Args:
        rule: The rule's name.
        exact: True if the rule equals the true gradient within the tolerance.
        deviation: The largest difference of an entry.
        relative_deviation: The norm of the difference divided by the norm of the true gradient.
        cosine: The cosine of the angle between the two gradients; NaN if one of them is 0.
        length_ratio: The norm of the rule's gradient divided by the norm of the true one; infinite if that
            is 0, NaN if both are.
        left_out: The number of entries at which the forward has a kink or a jump, and so no gradient.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient (at
            least 1).
    """

    rule: str
    exact: bool
    deviation: float
    relative_deviation: float
    cosine: float
    length_ratio: float
    left_out: int
    tolerance: float

    def __str__(self) -> str:
        details = f"largest deviation {self.deviation:.2g} (tolerance {self.tolerance:g})"
        if self.left_out:
            details += f"; left out at a kink or jump: {self.left_out}"
        if self.exact:
            return f"rule {self.rule!r} is exact: {details}"
        return (
            f"rule {self.rule!r} departs from the true gradient: {self.length_ratio:.2f} x as long, "
            f"cosine {self.cosine:.2f}, {details}"
        )


def gradcheck_rule(
    rule: str | Rule | RuleFunction,
    forward: Callable[..., Any],
    inputs: Any,
    *,
    numpy: bool = False,
    tolerance: float | None = None,
) -> RuleCheck:
    """Compare a rule with central finite differences, in double precision if the forward supports it.

    Both gradients are computed for random incoming gradients, ``vᵀ ∂forward/∂input``. A rule need not equal
    the true gradient: the result quantifies the difference.

    For a *step function* (round, sign, floor …) the true gradient is 0 wherever it exists. To check the
    formula of a surrogate, use the smooth approximation as the forward: ``gradcheck_rule("tanh", torch.tanh,
    x)`` is exact.

    Args:
        rule: A registered name, a dotted path, a :class:`~gradpolicy.Rule`, a function, or another operation,
            as for :func:`gradpolicy.apply`.
        forward: The operation: any deterministic function, as for :func:`gradpolicy.apply`; evaluated about
            four times per input entry.
        inputs: Its only argument, or a tuple of arguments. Floating-point tensors are converted to float64,
            unless the forward fails with them; arrays without a tensor among them are converted to tensors.
        numpy: True if the forward takes arrays, as for :func:`gradpolicy.apply`.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient. The
            default depends on the precision of the forward: 1e-6 for float64, 1e-2 for float32, 1e-1 below.

    Returns:
        The differences, printed as a sentence.

    Raises:
        PolicyError: If the forward is random, has a kink at every entry or no floating-point input, or the
            rule returns gradients of the wrong number or shape.

    Example:
        >>> x = torch.tensor([-1.5, 0.5, 2.0])
        >>> gradcheck_rule("tanh", torch.tanh, x).exact
        True
        >>> double = lambda grad, inputs, output: 2 * grad
        >>> print(gradcheck_rule(double, torch.clone, x))  # doctest: +ELLIPSIS
        rule '<lambda>' departs from the true gradient: 2.00 x as long, cosine 1.00, largest deviation ...
    """
    rule = replacing_rule("gradcheck_rule", rule, forward)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors_in(args):
        args = tuple(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args)

    def outputs_of(args: tuple) -> list[Tensor]:
        return [
            one for one in tensors_in(apply(rule, forward, *args, numpy=numpy)) if one.is_floating_point()
        ]

    # It fails if the forward uses other tensors of another precision.
    with contextlib.suppress(RuntimeError):
        double = map_tensors(Tensor.double, args, torch.is_floating_point)
        outputs_of(double)
        args = double
    points = [one.detach() for one in tensors_in(args) if one.is_floating_point()]
    if not sum(map(torch.numel, points)):
        raise PolicyError(f"rule {rule.name!r}: there is no floating-point input to check")
    dtypes = [one.dtype for one in (*points, *outputs_of(args))]
    dtype = max(dtypes, key=lambda each: torch.finfo(each).eps)

    def values_at(entries: Tensor) -> Tensor:
        """Return the entries of all outputs, at the entries of all inputs."""
        parts = iter(entries.split(list(map(torch.numel, points))))
        given = map_tensors(lambda one: next(parts).view_as(one).to(one.dtype), args, torch.is_floating_point)
        return torch.cat([one.double().flatten() for one in outputs_of(given)])

    entries = torch.cat([one.double().flatten() for one in points])
    values = values_at(entries)
    if not torch.allclose(values, values_at(entries), 0, 0, equal_nan=True):
        raise PolicyError(f"rule {rule.name!r}: the forward is random, its outputs differ from call to call")
    generator = torch.Generator("cpu").manual_seed(0)
    cotangents = torch.randn(COTANGENTS, len(values), generator=generator, device="cpu").to(values)
    by_rule = torch.stack([vjp(values_at, entries, each)[1] for each in cotangents])
    true, kinks = _differences(lambda moved: cotangents @ values_at(moved), entries, torch.finfo(dtype).eps)
    if kinks.all():
        raise PolicyError(f"rule {rule.name!r}: every entry is at a kink or jump of the forward; move them")
    true, by_rule = true[:, ~kinks], by_rule[:, ~kinks]
    tolerance = TOLERANCES.get(dtype, COARSE) if tolerance is None else tolerance
    bound = tolerance * max(1.0, float(true.abs().max()))
    deviation = float((by_rule - true).abs().max())
    # Values below the bound count as 0.
    true, by_rule = (torch.where(gradient.abs() <= bound, 0.0, gradient) for gradient in (true, by_rule))
    return RuleCheck(
        rule=rule.name,
        exact=deviation <= bound,
        deviation=deviation,
        relative_deviation=float((by_rule - true).norm() / true.norm()),
        cosine=float((by_rule * true).sum() / (by_rule.norm() * true.norm())),
        length_ratio=float(by_rule.norm() / true.norm()),
        left_out=int(kinks.sum()),
        tolerance=tolerance,
    )


def _differences(losses: Callable[[Tensor], Tensor], entries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the Jacobian by central differences, and the mask of entries at kinks or jumps.

    The step is the cube root of eps, the relative rounding error, which balances rounding and truncation
    errors. Where the forward is smooth, the difference between forward and backward differences is
    proportional to the step; at a kink or jump it is not.
    """
    centre, unit = losses(entries), eps ** (1 / 3)
    columns, kinks = [], []
    for place, value in enumerate(entries.tolist()):
        gaps = []
        for step in (unit / 4 * max(1.0, abs(value)), unit * max(1.0, abs(value))):
            move = torch.zeros_like(entries)
            move[place] = step
            above, below = losses(entries + move), losses(entries - move)
            central = (above - below) / (2 * step)
            gaps.append((above - 2 * centre + below).abs() / step)
        columns.append(central)
        large = gaps[1] > 16 * unit * central.abs().clamp(min=1.0)
        kinks.append((large & ((4 * gaps[0] - gaps[1]).abs() >= gaps[1] / 2)).any())
    return torch.stack(columns, 1), torch.stack(kinks)
