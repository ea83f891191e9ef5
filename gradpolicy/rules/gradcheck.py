"""How far a backward rule is from the true gradient, and in which direction it departs."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.call import Call
from gradpolicy.rules.registry import Rule
from gradpolicy.rules.routing import first_index

Outcomes = Callable[..., Iterable[tuple[Tensor, Tensor]]]

# The largest deviation that counts as exact, by the precision in which the forward computes.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
COARSE = 1e-1


@dataclass(frozen=True)
class Departure:
    """How two gradients differ: the rule's and the true one.

    Args:
        deviation: Largest difference of an entry.
        relative_deviation: Length of the difference over the length of the true gradient.
        cosine: Cosine of the angle between the two; NaN where one of them is 0.
        sign_agreement: Share of the entries with a true gradient in which the signs agree; NaN without any.
        length_ratio: Length of the rule's gradient over that of the true one; infinite where that is 0.
        passes_where_zero: Share of all entries with a gradient by the rule and none in truth.
        stops_where_not: Share of all entries with a gradient in truth and none by the rule.
        where: Where the largest deviation is: number of the input, then the index within it.
        rule_value: The rule's gradient there.
        true_value: The true gradient there.
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
        """The departure in words, the direction first."""
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
    """What :func:`gradcheck_rule` found, over all inputs together and for each.

    Args:
        rule: The rule's name.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient (at
            least 1).
        dtype: The precision in which the forward computes: the lowest of its inputs and results.
        exact: Whether the rule is the true gradient within the tolerance.
        left_out: Entries of the inputs at which the forward has a kink or a jump, so that there is no
            true gradient to compare with.
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


@dataclass(frozen=True)
class Subject:
    """What a rule is compared on.

    Args:
        rule: The rule.
        forward: Tensors to a tensor, or to a tuple of them.
        inputs: The tensors; differences are taken for the floating-point ones.
        call: The call of the forward, for a rule that asks for it.
    """

    rule: Rule
    forward: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    call: Call | None = None

    @property
    def numbers(self) -> list[int]:
        """Which inputs are floating-point, and not empty."""
        return [
            number
            for number, tensor in enumerate(self.inputs)
            if tensor.is_floating_point() and tensor.numel()
        ]


def check_rule(
    subject: Subject,
    *,
    outcomes: Outcomes | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    cotangents: int = 4,
    tolerance: float | None = None,
    seed: int = 0,
) -> RuleCheck:
    """Compares a rule with central differences; see :func:`gradpolicy.gradcheck_rule`."""
    name, inputs, numbers = subject.rule.name, subject.inputs, subject.numbers
    if not numbers:
        raise PolicyError(f"rule {name!r}: there is no floating-point input to check")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if outcomes is None:
            pairs, kinks, dtype = _compare(subject, cotangents, generator)
        else:
            losses = [loss] if loss else _linear_losses(outcomes, inputs, cotangents, generator)
            pairs, kinks = _compare_expected(subject, outcomes, losses)
            dtype = torch.float64
    chosen = TOLERANCES.get(dtype, COARSE) if tolerance is None else tolerance
    return _summary(name, pairs, kinks, numbers, inputs, chosen, dtype)


def enumerate_bits(probabilities: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every outcome of independent random bits with its probability: ``2ⁿ`` of them.

    Example:
        >>> import gradpolicy as gp
        >>> p = torch.tensor([0.5], dtype=torch.float64)
        >>> check = gp.gradcheck_rule("bernoulli", torch.bernoulli, p, outcomes=enumerate_bits)
        >>> check.exact
        True
    """
    for bits in itertools.product((0.0, 1.0), repeat=probabilities.numel()):
        output = torch.tensor(bits, dtype=probabilities.dtype).reshape(probabilities.shape)
        yield torch.where(output == 1, probabilities, 1 - probabilities).prod(), output


def enumerate_categories(logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every one-hot sample of one categorical variable with its probability.

    Args:
        logits: Unnormalised log-probabilities, one dimension.
    """
    yield from zip(torch.softmax(logits, -1), torch.eye(logits.numel(), dtype=logits.dtype), strict=True)


def _compare(
    subject: Subject, cotangents: int, generator: torch.Generator
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, torch.dtype]:
    """Pairs (by rule, true) of all inputs' gradients end to end; the entries at a kink; the precision."""
    inputs = subject.inputs
    outputs, again = _outputs(subject.forward(*inputs)), _outputs(subject.forward(*inputs))
    if not all(
        torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)
        for one, two in zip(outputs, again, strict=True)
    ):
        raise PolicyError(
            f"rule {subject.rule.name!r}: the forward is random; give outcomes= with all its outputs"
        )
    floating = [tensor.dtype for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
    dtype = max(floating, key=lambda each: torch.finfo(each).eps)

    def flat(*moved: Tensor) -> Tensor:
        return torch.cat([output.double().flatten() for output in _outputs(subject.forward(*moved))])

    jacobian, kinks = _differences(flat, inputs, subject.numbers, torch.finfo(dtype).eps)
    working = inputs[subject.numbers[0]].dtype
    output = tuple(tensor.to(working) for tensor in outputs)
    pairs = []
    for _ in range(cotangents):
        grads = tuple(
            torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(working)
            for tensor in outputs
        )
        one = len(outputs) == 1
        by_rule = _by_rule(subject, grads[0] if one else grads, output[0] if one else output)
        pairs.append((by_rule, jacobian @ torch.cat([grad.double().flatten() for grad in grads])))
    return pairs, kinks, dtype


def _outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results that a rule sees: a single one, or the floating-point ones of several."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(tensor for tensor in result if tensor.is_floating_point())


def _compare_expected(
    subject: Subject, outcomes: Outcomes, losses: list[Callable[[Tensor], Tensor]]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """As :func:`_compare`, for the expected gradient and the gradient of the expected loss."""
    inputs, numbers = subject.inputs, subject.numbers
    pairs = []
    kinks = torch.zeros(sum(inputs[number].numel() for number in numbers), dtype=torch.bool)
    for loss in losses:

        def expected(*moved: Tensor, of: Callable[[Tensor], Tensor] = loss) -> Tensor:
            return torch.stack([chance * of(output) for chance, output in outcomes(*moved)]).sum()

        by_rule = torch.stack(
            [
                chance * _by_rule(subject, _gradient(loss, output), output)
                for chance, output in outcomes(*inputs)
            ]
        ).sum(0)
        jacobian, at_kink = _differences(expected, inputs, numbers, torch.finfo(torch.float64).eps)
        pairs.append((by_rule, jacobian.flatten()))
        kinks |= at_kink
    return pairs, kinks


def _linear_losses(
    outcomes: Outcomes, inputs: tuple[Tensor, ...], count: int, generator: torch.Generator
) -> list[Callable[[Tensor], Tensor]]:
    output = next(iter(outcomes(*inputs)))[1]
    weights = torch.randn(count, *output.shape, dtype=torch.float64, generator=generator)
    return [functools.partial(_weighted_sum, weight) for weight in weights]


def _weighted_sum(weight: Tensor, output: Tensor) -> Tensor:
    return (weight * output).sum()


def _gradient(loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    with torch.enable_grad():
        point = output.detach().requires_grad_()
        return torch.autograd.grad(loss(point), point)[0]


def _by_rule(subject: Subject, grad: Any, output: Any) -> Tensor:
    """The rule's gradients for the floating-point inputs, end to end; None counts as zeros."""
    rule, inputs = subject.rule, subject.inputs
    returned = rule(grad, inputs, output, subject.call)
    gradients = returned
    if not isinstance(returned, tuple | list):
        gradients = [returned if number == first_index(inputs) else None for number in range(len(inputs))]
    if len(gradients) != len(inputs):
        raise PolicyError(f"rule {rule.name!r} returned {len(gradients)} gradients for {len(inputs)} inputs")
    flat = []
    for number in subject.numbers:
        gradient, tensor = gradients[number], inputs[number]
        if gradient is None:
            gradient = torch.zeros_like(tensor)
        if not isinstance(gradient, Tensor):
            raise PolicyError(f"rule {rule.name!r} returned {gradient!r} for input {number}, not a tensor")
        if gradient.shape != tensor.shape:
            raise PolicyError(
                f"rule {rule.name!r} returned a gradient of shape {tuple(gradient.shape)} "
                f"for input {number} of shape {tuple(tensor.shape)}"
            )
        flat.append(gradient.double().flatten())
    return torch.cat(flat)


def _differences(
    forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], numbers: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """The transposed Jacobian by central differences, and which entries lie at a kink or jump.

    The step is the cube root of eps, the relative size of rounding, which balances that against truncation.
    Where the forward is smooth, what the differences to either side disagree by shrinks with the step.
    """
    centre = forward(*inputs).flatten()
    rows, kinks, unit = [], [], eps ** (1 / 3)
    for number in numbers:
        for entry in range(inputs[number].numel()):
            step = unit * max(1.0, abs(inputs[number].flatten()[entry].item()))
            gaps = []
            for length in (step / 4, step):
                above = forward(*_moved(inputs, number, entry, length)).flatten()
                below = forward(*_moved(inputs, number, entry, -length)).flatten()
                central = (above - below) / (2 * length)
                gaps.append((above - 2 * centre + below).abs() / length)
            rows.append(central)
            large = gaps[1] > 16 * unit * central.abs().clamp(min=1.0)
            shrinks = (4 * gaps[0] - gaps[1]).abs() < gaps[1] / 2
            kinks.append(bool((large & ~shrinks).any()))
    return torch.stack(rows), torch.tensor(kinks)


def _moved(inputs: tuple[Tensor, ...], number: int, entry: int, length: float) -> tuple[Tensor, ...]:
    moved = inputs[number].clone(memory_format=torch.contiguous_format)
    moved.view(-1)[entry] += length
    return (*inputs[:number], moved, *inputs[number + 1 :])


def _summary(
    name: str,
    pairs: list[tuple[Tensor, Tensor]],
    kinks: Tensor,
    numbers: list[int],
    inputs: tuple[Tensor, ...],
    tolerance: float,
    dtype: torch.dtype,
) -> RuleCheck:
    smooth = ~kinks
    if not smooth.any():
        raise PolicyError(
            f"rule {name!r}: every entry lies at a kink or jump of the forward; move the inputs"
        )
    by_rule = torch.stack([pair[0] for pair in pairs])
    true = torch.stack([pair[1] for pair in pairs])
    index = [
        (number, *position)
        for number in numbers
        for position in itertools.product(*(range(size) for size in inputs[number].shape))
    ]
    bound = tolerance * max(1.0, float(true[:, smooth].abs().max()))
    by_input = []
    for number in numbers:
        own = smooth & torch.tensor([entry[0] == number for entry in index])
        if own.any():
            by_input.append(_departure(by_rule, true, own, index, bound))
    overall = _departure(by_rule, true, smooth, index, bound)
    return RuleCheck(
        **vars(overall),
        rule=name,
        tolerance=tolerance,
        dtype=dtype,
        exact=overall.deviation <= bound,
        left_out=int(kinks.sum()),
        by_input=tuple(by_input),
    )


def _departure(
    by_rule: Tensor, true: Tensor, chosen: Tensor, index: list[tuple[int, ...]], bound: float
) -> Departure:
    """The figures for the chosen entries. What lies below the bound counts as 0."""
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
    """A ratio of lengths; infinite for something over nothing, ``neither`` for nothing over nothing."""
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
