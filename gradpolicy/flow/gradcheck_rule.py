"""``gradcheck_rule``: comparison of a rule with the true gradient.

The true gradient is computed by central differences here, since torch has no public numerical Jacobian
(``torch.autograd.gradcheck`` returns only a bool, and ``get_numerical_jacobian`` is deprecated), and since
kinks must be detected.
"""

import itertools
import math
from collections.abc import Callable
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
from gradpolicy.rules.gradcheck import Outcomes
from gradpolicy.rules.registry import Call, Rule, RuleFunction

# The largest deviation that counts as exact, by the precision of the forward.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
COARSE = 1e-1


@dataclass(frozen=True)
class Departure:
    """The difference between a rule's gradient and the true gradient.

    Args:
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

    def describe(self) -> str:
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


@dataclass(frozen=True)
class RuleCheck(Departure):
    """The result of :func:`gradcheck_rule`, over all inputs together and for each input.

    Args:
        rule: The rule's name.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient (at
            least 1).
        dtype: The precision of the forward: the lowest of its inputs and results.
        exact: True if the rule equals the true gradient within the tolerance.
        left_out: The number of entries at which the forward has a kink or a jump, and so no gradient.
        by_input: The departure for each floating-point input.
    """

    rule: str
    tolerance: float
    dtype: torch.dtype
    exact: bool
    left_out: int
    by_input: tuple[Departure, ...]

    def __str__(self) -> str:
        left_out = f"; left out at a kink or jump: {self.left_out}" if self.left_out else ""
        left_out += f"; tolerance {self.tolerance:g} ({str(self.dtype).removeprefix('torch.')})"
        if self.exact:
            return f"rule {self.rule!r} is exact: largest deviation {self.deviation:.1e}{left_out}"
        lines = [f"rule {self.rule!r} departs from the true gradient: {self.describe()}{left_out}"]
        if len(self.by_input) > 1:
            lines += [f"  input {part.where[0]}: {part.describe()}" for part in self.by_input]
        return "\n".join(lines)


def gradcheck_rule(
    rule: str | Rule | RuleFunction,
    forward: Callable[..., Any],
    inputs: Any,
    *,
    numpy: bool = False,
    outcomes: Outcomes | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
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

    For a *random* forward pass ``outcomes``. The expectation of the rule's gradient over all outcomes is then
    compared with the gradient of the expected loss.

    Args:
        rule: A registered name, a dotted path, a :class:`~gradpolicy.Rule`, a function, or another operation,
            as for :func:`gradpolicy.apply`.
        forward: The operation: any function, as for :func:`gradpolicy.apply`; evaluated about four times per
            input entry.
        inputs: Its only argument, or a tuple of arguments. Floating-point tensors are converted to float64,
            unless the forward fails with them; a single array is converted to a tensor.
        numpy: True if the forward takes arrays, as for :func:`gradpolicy.apply`.
        outcomes: For a random forward, ``outcomes(*inputs)`` returns all possible outputs with their
            probabilities, as pairs ``(probability, output)``. See ``enumerate_bits`` and
            ``enumerate_categories`` in :mod:`gradpolicy.rules.gradcheck`.
        loss: With outcomes: a scalar function of the output; by default, random linear functions.
        cotangents: The number of random incoming gradients.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient. The
            default depends on the precision of the forward: 1e-6 for float64, 1e-2 for float32, 1e-1 below.
        seed: The seed of the incoming gradients.

    Returns:
        The differences, printed as a sentence.

    Raises:
        PolicyError: If the forward is random and no outcomes are given, or the rule returns gradients of the
            wrong number or shape.

    Example:
        >>> x = torch.tensor([-1.5, 0.5, 2.0])
        >>> gradcheck_rule("tanh", torch.tanh, x).exact
        True
        >>> double = lambda grad, inputs, output: 2 * grad
        >>> print(gradcheck_rule(double, torch.clone, x[:1], cotangents=1))  # doctest: +ELLIPSIS
        rule '<lambda>' departs from the true gradient: 2 x longer; cosine 1.00; largest at input 0 [0]: ...
    """
    check_forward("gradcheck_rule", forward)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors_in(args):
        args = tuple(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args)
    args = map_tensors(Tensor.detach, args)

    def evaluate(*tensors: Tensor) -> Any:
        return run_forward(forward, _with_tensors(args, tensors), {}, numpy)

    with torch.no_grad():
        exact = _in_double(tuple(tensors_in(args)), evaluate if outcomes is None else None)
        call = call_of(forward, _with_tensors(args, exact), {})
        comparison = _Comparison(replacing_rule("gradcheck_rule", rule), exact, call)
        dtype = torch.float64
        if outcomes is None:
            loss, dtype = None, comparison.precision_of(evaluate)
            outcomes = comparison.only_outcome(evaluate)
        output = next(iter(outcomes(*exact)))[1]
        generator = torch.Generator("cpu").manual_seed(seed)
        losses = [loss] if loss else [_random_loss(output, generator) for _ in range(cotangents)]
        tolerance = TOLERANCES.get(dtype, COARSE) if tolerance is None else tolerance
        return comparison.compare(outcomes, losses, tolerance, dtype)


class _Comparison:
    """The gradients of a rule and of finite differences. All floating-point inputs are one flat vector."""

    def __init__(self, rule: Rule, inputs: tuple[Tensor, ...], call: Call) -> None:
        state = RuleState(call.operation, rule, has_own_gradient=False)
        self.bound_rule = BoundRule(state, f"forward {call.operation!r}").for_call(call)
        self.rule, self.inputs = rule, inputs
        self.numbers = [n for n, one in enumerate(inputs) if one.is_floating_point() and one.numel()]
        if not self.numbers:
            raise PolicyError(f"rule {rule.name!r}: there is no floating-point input to check")

    def precision_of(self, forward: Callable[..., Any]) -> torch.dtype:
        """Return the precision of a forward: the lowest of its inputs and results.

        Raises:
            PolicyError: If the forward is random.
        """
        outputs, again = (_outputs(forward(*self.inputs)) for _ in range(2))
        for one, other in zip(outputs, again, strict=True):
            if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                raise PolicyError(
                    f"rule {self.rule.name!r}: the forward is random; give outcomes= with all its outputs"
                )
        floating = [tensor.dtype for tensor in (*self.inputs, *outputs) if tensor.is_floating_point()]
        return max(floating, key=lambda each: torch.finfo(each).eps)

    def only_outcome(self, forward: Callable[..., Any]) -> Callable[..., list]:
        """Return a deterministic forward in the form of ``outcomes``, in the dtype of the inputs."""
        dtype = self.inputs[self.numbers[0]].dtype

        def outcome(*inputs: Tensor) -> list:
            outputs = tuple(tensor.to(dtype) for tensor in _outputs(forward(*inputs)))
            return [(1.0, outputs[0] if len(outputs) == 1 else outputs)]

        return outcome

    def compare(
        self, outcomes: Callable[..., Any], losses: list[Callable], tolerance: float, dtype: torch.dtype
    ) -> RuleCheck:
        """Return the differences of the expected gradients, over all inputs together and for each input."""

        def expected(*inputs: Tensor) -> Tensor:
            found = list(outcomes(*inputs))
            return torch.stack([sum(chance * of(output) for chance, output in found) for of in losses])

        true, kinks = self._differences(expected, torch.finfo(dtype).eps)
        expectations = [
            sum(
                chance * self._by_rule(_gradient(of, output), output)
                for chance, output in outcomes(*self.inputs)
            )
            for of in losses
        ]
        by_rule, smooth, name = torch.stack(expectations), ~kinks, self.rule.name
        if not smooth.any():
            raise PolicyError(
                f"rule {name!r}: every entry lies at a kink or jump of the forward; move the inputs"
            )
        index = [
            (number, *position)
            for number in self.numbers
            for position in itertools.product(*map(range, self.inputs[number].shape))
        ]
        bound = tolerance * max(1.0, float(true[:, smooth].abs().max()))
        numbers = smooth.new_tensor([entry[0] for entry in index], dtype=torch.int64)
        chosen = [smooth & (numbers == number) for number in self.numbers]
        overall = _departure(by_rule, true, smooth, index, bound)
        return RuleCheck(
            **vars(overall),
            rule=name,
            tolerance=tolerance,
            dtype=dtype,
            exact=overall.deviation <= bound,
            left_out=int(kinks.sum()),
            by_input=tuple(_departure(by_rule, true, own, index, bound) for own in chosen if own.any()),
        )

    def _by_rule(self, grad: Any, output: Any) -> Tensor:
        """Return the rule's gradients of the floating-point inputs as a flat vector, with zeros for None."""
        wanted = [number in self.numbers for number in range(len(self.inputs))]
        gradients = self.bound_rule.gradients(grad, self.inputs, output, wanted)
        given = [(gradients[number], self.inputs[number]) for number in self.numbers]
        flat = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in given]
        return torch.cat([gradient.double().flatten() for gradient in flat])

    def _differences(self, forward: Callable[..., Tensor], eps: float) -> tuple[Tensor, Tensor]:
        """Return the Jacobian by central differences, and the mask of entries at kinks or jumps.

        The step is the cube root of eps, the relative rounding error, which balances rounding and truncation
        errors. Where the forward is smooth, the difference between forward and backward differences is
        proportional to the step; at a kink or jump it is not.
        """
        centre, unit = forward(*self.inputs), eps ** (1 / 3)
        columns, kinks = [], []
        for number in self.numbers:
            for entry, value in enumerate(self.inputs[number].flatten().tolist()):
                step = unit * max(1.0, abs(value))
                gaps = []
                for length in (step / 4, step):
                    above, below = (forward(*self._moved(number, entry, by)) for by in (length, -length))
                    central = (above - below) / (2 * length)
                    gaps.append((above - 2 * centre + below).abs() / length)
                columns.append(central)
                large = gaps[1] > 16 * unit * central.abs().clamp(min=1.0)
                shrinks = (4 * gaps[0] - gaps[1]).abs() < gaps[1] / 2
                kinks.append(bool((large & ~shrinks).any()))
        return torch.stack(columns, 1), columns[0].new_tensor(kinks, dtype=torch.bool)

    def _moved(self, number: int, entry: int, length: float) -> tuple[Tensor, ...]:
        moved = self.inputs[number].clone(memory_format=torch.contiguous_format)
        moved.view(-1)[entry] += length
        return (*self.inputs[:number], moved, *self.inputs[number + 1 :])


def _outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs that have a gradient: a single one, or the floating-point ones of several."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(tensor for tensor in result if tensor.is_floating_point())


def _random_loss(output: Tensor | tuple[Tensor, ...], generator: torch.Generator) -> Callable:
    """Return a random linear function of an output, in double precision."""
    weights = [
        torch.randn(one.shape, dtype=torch.float64, generator=generator, device="cpu").to(one.device)
        for one in _outputs(output)
    ]

    def loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
        pairs = zip(weights, _outputs(output), strict=True)
        return torch.stack([(weight * one.double()).sum() for weight, one in pairs]).sum()

    return loss


def _gradient(loss: Callable, output: Tensor | tuple[Tensor, ...]) -> Any:
    """Return the gradient of a loss with respect to an output, or each of several outputs."""
    with torch.enable_grad():
        point = map_tensors(lambda tensor: tensor.detach().requires_grad_(), output)
        found = torch.autograd.grad(loss(point), tensors_in(point))
    return found[0] if isinstance(output, Tensor) else found


def _departure(
    by_rule: Tensor, true: Tensor, chosen: Tensor, index: list[tuple[int, ...]], bound: float
) -> Departure:
    """Return the differences of the chosen entries. Values below the bound count as 0."""
    difference = torch.where(chosen, (by_rule - true).abs(), -1.0)
    trial, entry = divmod(int(difference.argmax()), by_rule.shape[1])
    rule_part, true_part = (
        torch.where(gradient.abs() <= bound, 0.0, gradient)[:, chosen] for gradient in (by_rule, true)
    )
    rule_length, true_length = float(rule_part.norm()), float(true_part.norm())
    passes, should_pass = rule_part != 0, true_part != 0
    same_sign = torch.sign(rule_part[should_pass]) == torch.sign(true_part[should_pass])
    product = rule_length * true_length
    return Departure(
        deviation=float(difference[trial, entry]),
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


def _in_double(tensors: tuple[Tensor, ...], evaluate: Callable[..., Any] | None) -> tuple[Tensor, ...]:
    """Return the tensors in float64; unchanged if the forward fails with these."""
    exact = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)
    if evaluate is not None and any(one is not two for one, two in zip(exact, tensors, strict=True)):
        try:
            evaluate(*exact)
        except RuntimeError:
            # It uses other tensors of another precision.
            return tensors
    return exact


def _with_tensors(args: tuple, tensors: tuple[Tensor, ...]) -> tuple:
    """Return the arguments with their tensors replaced, in order."""
    left = iter(tensors)
    return map_tensors(lambda _: next(left), args)
