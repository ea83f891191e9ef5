"""``gradcheck_rule``: comparison of a rule with the true gradient.

The true gradient is computed by central differences here, since torch has no public numerical Jacobian
(``torch.autograd.gradcheck`` returns only a bool, and ``get_numerical_jacobian`` is deprecated), and since
kinks must be detected.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.apply import call_of, check_forward, replacing_rule, run_forward
from gradpolicy.flow.bound_rule import BoundRule
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.flow.rule_state import RuleState
from gradpolicy.rules.registry import Rule, RuleFunction

# The largest deviation that counts as exact, by the precision of the forward.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
COARSE = 1e-1


@dataclass(frozen=True)
class RuleCheck:
    """The difference between a rule's gradient and the true gradient, over all inputs together.

    Args:
        rule: The rule's name.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient (at
            least 1).
        dtype: The precision of the forward: the lowest of its inputs and results.
        exact: True if the rule equals the true gradient within the tolerance.
        left_out: The number of entries at which the forward has a kink or a jump, and so no gradient.
        deviation: The largest difference of an entry.
        relative_deviation: The norm of the difference divided by the norm of the true gradient.
        cosine: The cosine of the angle between the two gradients; NaN if one of them is 0.
        sign_agreement: The fraction of entries with the same sign, among those where the true gradient is not
            0; NaN if there are none.
        length_ratio: The norm of the rule's gradient divided by the norm of the true one; infinite if that
            is 0.
        passes_where_zero: The fraction of entries where only the true gradient is 0.
        stops_where_not: The fraction of entries where only the rule's gradient is 0.
        where: The entry with the largest deviation: the number of the input, then the index within it.
        rule_value: The rule's gradient of this entry.
        true_value: The true gradient of this entry.
    """

    rule: str
    tolerance: float
    dtype: torch.dtype
    exact: bool
    left_out: int
    deviation: float
    relative_deviation: float
    cosine: float
    sign_agreement: float
    length_ratio: float
    passes_where_zero: float
    stops_where_not: float
    where: tuple[int, ...]
    rule_value: float
    true_value: float

    def __str__(self) -> str:
        end = f"; left out at a kink or jump: {self.left_out}" if self.left_out else ""
        end += f"; tolerance {self.tolerance:g} ({str(self.dtype).removeprefix('torch.')})"
        if self.exact:
            return f"rule {self.rule!r} is exact: largest deviation {self.deviation:.1e}{end}"
        return f"rule {self.rule!r} departs from the true gradient: {self._describe()}{end}"

    def _describe(self) -> str:
        """Describe the departure in words: length, direction, then single entries."""
        words = [] if math.isinf(self.length_ratio) else [_length_in_words(self.length_ratio)]
        if not math.isnan(self.cosine):
            words.append(f"cosine {self.cosine:.2f}")
        if self.length_ratio > 0 and self.sign_agreement < 1:
            words.append(f"signs agree in {self.sign_agreement:.0%} of the entries")
        if self.passes_where_zero:
            words.append(
                f"passes gradient where the true one is 0 ({self.passes_where_zero:.0%} of the entries)"
            )
        if self.stops_where_not:
            words.append(f"stops gradient where the true one is not 0 ({self.stops_where_not:.0%})")
        number, *index = self.where
        words.append(
            f"largest at input {number} {index}: {self.rule_value:.4g} instead of {self.true_value:.4g}"
        )
        return "; ".join(words)


def gradcheck_rule(
    rule: str | Rule | RuleFunction,
    forward: Callable[..., Any],
    inputs: Any,
    *,
    numpy: bool = False,
    cotangents: int = 4,
    tolerance: float | None = None,
    seed: int = 0,
) -> RuleCheck:
    """Compare a rule with central finite differences, in double precision if the forward supports it.

    Both gradients are computed for random incoming gradients, ``vᵀ ∂forward/∂input``. A rule need not equal
    the true gradient: the result quantifies the difference.

    For a *step function* (round, sign, floor …) the true gradient is 0 wherever it exists, so every
    straight-through rule "passes gradient where the true one is 0". To check its formula, use the smooth
    approximation as the forward: ``gradcheck_rule("tanh", torch.tanh, x)`` is exact.

    Args:
        rule: A registered name, a dotted path, a :class:`~gradpolicy.Rule`, a function, or another operation,
            as for :func:`gradpolicy.apply`.
        forward: The operation: any function, as for :func:`gradpolicy.apply`; evaluated about four times per
            input entry.
        inputs: Its only argument, or a tuple of arguments. Floating-point tensors are converted to float64,
            unless the forward fails with them; a single array is converted to a tensor.
        numpy: True if the forward takes arrays, as for :func:`gradpolicy.apply`.
        cotangents: The number of random incoming gradients.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient. The
            default depends on the precision of the forward: 1e-6 for float64, 1e-2 for float32, 1e-1 below.
        seed: The seed of the incoming gradients.

    Returns:
        The differences, printed as a sentence.

    Raises:
        PolicyError: If the forward is random, there is no entry to check, or the rule returns gradients of
            the wrong number or shape.

    Example:
        >>> x = torch.tensor([-1.5, 0.5, 2.0])
        >>> gradcheck_rule("tanh", torch.tanh, x).exact
        True
        >>> double = lambda grad, inputs, output: 2 * grad
        >>> print(gradcheck_rule(double, torch.clone, x[:1], cotangents=1))  # doctest: +ELLIPSIS
        rule '<lambda>' departs from the true gradient: 2 x longer; cosine 1.00; largest at input 0 [0]: ...
    """
    check_forward("gradcheck_rule", forward)
    found = replacing_rule("gradcheck_rule", rule)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors_in(args):
        args = tuple(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args)
    args = map_tensors(Tensor.detach, args)

    def evaluate(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs that have a gradient: a single one, or the floating-point ones of several."""
        result = run_forward(forward, _with_tensors(args, tensors), {}, numpy)
        return (result,) if isinstance(result, Tensor) else tuple(t for t in result if t.is_floating_point())

    with torch.no_grad():
        tensors = _in_double(tensors_in(args), evaluate)
        checked = [n for n, one in enumerate(tensors) if one.is_floating_point() and one.numel()]
        if not checked:
            raise PolicyError(f"rule {found.name!r}: there is no floating-point input to check")
        outputs, again = evaluate(tensors), evaluate(tensors)
        pairs = zip(outputs, again, strict=True)
        if not all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in pairs):
            raise PolicyError(f"rule {found.name!r}: the forward is random, so differences say nothing")
        dtype = _precision((*tensors, *outputs))
        generator = torch.Generator().manual_seed(seed)
        weights = [
            [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in outputs]
            for _ in range(cotangents)
        ]

        def products(tensors: Sequence[Tensor]) -> Tensor:
            """Return the products of the outputs with each incoming gradient."""
            results = [output.double() for output in evaluate(tensors)]
            return torch.stack(
                [sum((w * r).sum() for w, r in zip(own, results, strict=True)) for own in weights]  # type: ignore[misc]
            )

        true, kinks = _differences(products, tensors, checked, torch.finfo(dtype).eps)
        call = call_of(forward, _with_tensors(args, tensors), {})
        bound_rule = BoundRule(
            RuleState(call.operation, found, has_own_gradient=False), f"forward {call.operation!r}"
        ).for_call(call)
        results = tuple(output.to(tensors[checked[0]].dtype) for output in outputs)
        by_rule = torch.stack([_by_rule(bound_rule, own, tensors, results, checked) for own in weights])
    index = [(n, *place) for n in checked for place in itertools.product(*map(range, tensors[n].shape))]
    largest = TOLERANCES.get(dtype, COARSE) if tolerance is None else tolerance
    return _compare(found.name, by_rule, true, ~kinks, index, largest, dtype)


def _in_double(tensors: list[Tensor], evaluate: Callable[[Sequence[Tensor]], Any]) -> list[Tensor]:
    """Return the tensors in float64; unchanged if the forward fails with these."""
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    try:
        evaluate(exact)
    except RuntimeError:
        # It uses other tensors of another precision.
        return tensors
    return exact


def _with_tensors(args: tuple, tensors: Sequence[Tensor]) -> tuple:
    """Return the arguments with their tensors replaced, in order."""
    left = iter(tensors)
    return map_tensors(lambda _: next(left), args)


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the lowest floating-point precision of some tensors."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _by_rule(
    bound_rule: BoundRule,
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: tuple[Tensor, ...],
    checked: list[int],
) -> Tensor:
    """Return the rule's gradients of the floating-point inputs as a flat vector, with zeros for None."""
    grads = tuple(weight.to(output.dtype) for weight, output in zip(weights, outputs, strict=True))
    grad, output = (grads[0], outputs[0]) if len(outputs) == 1 else (grads, outputs)
    wanted = [number in checked for number in range(len(inputs))]
    gradients = bound_rule.gradients(grad, tuple(inputs), output, wanted)
    given = [(gradients[number], inputs[number]) for number in checked]
    flat = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in given]
    return torch.cat([gradient.double().flatten() for gradient in flat])


def _differences(
    forward: Callable[[Sequence[Tensor]], Tensor], inputs: list[Tensor], checked: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the Jacobian by central differences, and the mask of entries at kinks or jumps.

    The step is the cube root of eps, the relative rounding error, which balances rounding and truncation
    errors. Where the forward is smooth, the difference between forward and backward differences is
    proportional to the step; at a kink or jump it is not.
    """

    def moved(number: int, entry: int, length: float) -> Tensor:
        changed = inputs[number].clone(memory_format=torch.contiguous_format)
        changed.view(-1)[entry] += length
        return forward([*inputs[:number], changed, *inputs[number + 1 :]])

    centre, unit = forward(inputs), eps ** (1 / 3)
    columns, kinks = [], []
    for number in checked:
        for entry, value in enumerate(inputs[number].flatten().tolist()):
            step = unit * max(1.0, abs(value))
            gaps = []
            for length in (step / 4, step):
                above, below = moved(number, entry, length), moved(number, entry, -length)
                central = (above - below) / (2 * length)
                gaps.append((above - 2 * centre + below).abs() / length)
            columns.append(central)
            large = gaps[1] > 16 * unit * central.abs().clamp(min=1.0)
            shrinks = (4 * gaps[0] - gaps[1]).abs() < gaps[1] / 2
            kinks.append(bool((large & ~shrinks).any()))
    return torch.stack(columns, 1), torch.tensor(kinks)


def _compare(
    rule: str,
    by_rule: Tensor,
    true: Tensor,
    smooth: Tensor,
    index: list[tuple[int, ...]],
    tolerance: float,
    dtype: torch.dtype,
) -> RuleCheck:
    """Return the differences of the smooth entries. Values below the bound count as 0."""
    if not smooth.any():
        raise PolicyError(f"rule {rule!r}: every entry lies at a kink or jump of the forward; move the inputs")
    bound = tolerance * max(1.0, float(true[:, smooth].abs().max()))
    difference = torch.where(smooth, (by_rule - true).abs(), -1.0)
    trial, entry = divmod(int(difference.argmax()), by_rule.shape[1])
    deviation = float(difference[trial, entry])
    rule_part, true_part = (
        torch.where(gradient.abs() <= bound, 0.0, gradient)[:, smooth] for gradient in (by_rule, true)
    )
    rule_length, true_length = float(rule_part.norm()), float(true_part.norm())
    passes, should_pass = rule_part != 0, true_part != 0
    same_sign = torch.sign(rule_part[should_pass]) == torch.sign(true_part[should_pass])
    product = rule_length * true_length
    return RuleCheck(
        rule=rule,
        tolerance=tolerance,
        dtype=dtype,
        exact=deviation <= bound,
        left_out=int((~smooth).sum()),
        deviation=deviation,
        relative_deviation=_ratio(float((rule_part - true_part).norm()), true_length, neither=0.0),
        cosine=float((rule_part * true_part).sum()) / product if product else math.nan,
        sign_agreement=float(same_sign.double().mean()),
        length_ratio=_ratio(rule_length, true_length, neither=1.0),
        passes_where_zero=float((passes & ~should_pass).double().mean()),
        stops_where_not=float((should_pass & ~passes).double().mean()),
        where=index[entry],
        rule_value=float(by_rule[trial, entry]),
        true_value=float(true[trial, entry]),
    )


def _ratio(part: float, whole: float, neither: float) -> float:
    """Return a ratio of norms; infinity for a denominator of 0, ``neither`` if both are 0."""
    if whole:
        return part / whole
    return math.inf if part else neither


def _length_in_words(ratio: float) -> str:
    if math.isnan(ratio):
        return "not a number"
    if ratio == 0:
        return "no gradient at all"
    if abs(ratio - 1) < 0.005:
        return "of the same length"
    return f"{ratio:.2g} x longer" if ratio > 1 else f"{ratio:.2g} x as long"
