"""How far a backward rule is from the true gradient, and in which direction it departs."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule

Outcomes = Callable[..., Iterable[tuple[Tensor, Tensor]]]

# The step that balances rounding against truncation for central differences in double precision.
_STEP = torch.finfo(torch.float64).eps ** (1 / 3)


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
        exact: Whether the rule is the true gradient within the tolerance.
        left_out: Entries of the inputs at which the forward has a kink or a jump, so that there is no
            true gradient to compare with.
        by_input: The departure for each floating-point input.
    """

    rule: str
    tolerance: float
    exact: bool
    left_out: int
    by_input: tuple[Departure, ...]

    def __str__(self) -> str:
        left_out = f"; left out at a kink or jump: {self.left_out}" if self.left_out else ""
        if self.exact:
            return f"rule {self.rule!r} is exact: largest deviation {self.deviation:.1e}{left_out}"
        lines = [f"rule {self.rule!r} departs from the true gradient: {self.describe()}{left_out}"]
        if len(self.by_input) > 1:
            lines += [f"  input {part.where[0]}: {part.describe()}" for part in self.by_input]
        return "\n".join(lines)


def gradcheck_rule(
    rule: str | Rule | RuleFunction,
    forward: Callable[..., Tensor],
    inputs: Tensor | tuple[Tensor, ...],
    *,
    outcomes: Outcomes | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    cotangents: int = 4,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> RuleCheck:
    """Compares a rule with central finite differences in double precision.

    Both gradients are taken for random incoming gradients, ``vᵀ ∂forward/∂input``. A rule that departs on
    purpose does not fail: the result says how far, and in which direction.

    For a *step function* (round, sign, floor …) the true gradient is 0 wherever it exists. Every
    straight-through rule then "passes gradient where the true one is 0", which is what it is for. To check
    its formula, give the smooth stand-in as the forward: ``gradcheck_rule("tanh", torch.tanh, x)`` is exact.

    For a *random* forward give ``outcomes``. The rule's expected gradient, over all outcomes, is then
    compared with the gradient of the expected loss.

    Args:
        rule: A registered name, a dotted path, a :class:`Rule` or a function.
        forward: The operation, tensors to a tensor; evaluated about four times an input entry.
        inputs: One tensor or several; floating-point ones are taken to float64, others given as they are.
        outcomes: ``outcomes(*inputs)`` gives every possible output with its probability, differentiable
            in the mathematical sense: pairs ``(probability, output)``. :func:`enumerate_bits` and
            :func:`enumerate_categories` are ready ones.
        loss: With outcomes: a scalar function of the output. Unless given, random linear functions.
        cotangents: How many random incoming gradients to try.
        tolerance: See :class:`RuleCheck`.
        seed: Seed of the incoming gradients.

    Returns:
        The figures; ``print`` it for a sentence.

    Raises:
        PolicyError: If the forward gives something else each time and no outcomes are given, or the rule
            returns gradients of the wrong number or shape.

    Example:
        >>> x = torch.tensor([-1.5, 0.5, 2.0])
        >>> gradcheck_rule("tanh", torch.tanh, x).exact
        True
        >>> double = lambda grad, inputs, output: 2 * grad
        >>> print(gradcheck_rule(double, torch.clone, x[:1], cotangents=1))  # doctest: +ELLIPSIS
        rule '<lambda>' departs from the true gradient: 2 x longer; cosine 1.00; largest at input 0 [0]: ...
    """
    found = get_rule(rule)
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    exact_inputs = tuple(
        tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in given
    )
    numbers = [number for number, tensor in enumerate(exact_inputs) if tensor.is_floating_point()]
    if not numbers:
        raise PolicyError(f"rule {found.name!r}: there is no floating-point input to check")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if outcomes is None:
            pairs, kinks = _compare(found, forward, exact_inputs, numbers, cotangents, generator)
        else:
            losses = [loss] if loss else _linear_losses(outcomes, exact_inputs, cotangents, generator)
            pairs, kinks = _compare_expected(found, outcomes, losses, exact_inputs, numbers)
    return _summary(found.name, pairs, kinks, numbers, exact_inputs, tolerance)


def enumerate_bits(probabilities: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every outcome of independent random bits with its probability: ``2ⁿ`` of them.

    Example:
        >>> p = torch.tensor([0.5], dtype=torch.float64)
        >>> check = gradcheck_rule("bernoulli", torch.bernoulli, p, outcomes=enumerate_bits)
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
    rule: Rule,
    forward: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    numbers: list[int],
    cotangents: int,
    generator: torch.Generator,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Pairs (by rule, true) of all inputs' gradients end to end, and which entries lie at a kink."""
    output = forward(*inputs)
    if not torch.allclose(output, forward(*inputs), rtol=0, atol=0, equal_nan=True):
        raise PolicyError(f"rule {rule.name!r}: the forward is random; give outcomes= with all its outputs")
    jacobian, kinks = _differences(lambda *moved: forward(*moved).double(), inputs, numbers)
    pairs = []
    for _ in range(cotangents):
        grad = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        by_rule = _by_rule(rule, grad, inputs, output.double(), numbers)
        pairs.append((by_rule, jacobian @ grad.flatten()))
    return pairs, kinks


def _compare_expected(
    rule: Rule,
    outcomes: Outcomes,
    losses: list[Callable[[Tensor], Tensor]],
    inputs: tuple[Tensor, ...],
    numbers: list[int],
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """As :func:`_compare`, for the expected gradient and the gradient of the expected loss."""
    pairs = []
    kinks = torch.zeros(sum(inputs[number].numel() for number in numbers), dtype=torch.bool)
    for loss in losses:

        def expected(*moved: Tensor, of: Callable[[Tensor], Tensor] = loss) -> Tensor:
            return torch.stack([chance * of(output) for chance, output in outcomes(*moved)]).sum()

        by_rule = torch.stack(
            [
                chance * _by_rule(rule, _gradient(loss, output), inputs, output, numbers)
                for chance, output in outcomes(*inputs)
            ]
        ).sum(0)
        jacobian, at_kink = _differences(expected, inputs, numbers)
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


def _by_rule(
    rule: Rule, grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, numbers: list[int]
) -> Tensor:
    """The rule's gradients for the inputs with these numbers, end to end; None counts as zeros."""
    returned = rule(grad, inputs, output)
    gradients = returned if isinstance(returned, tuple | list) else (returned,)
    if len(gradients) != len(inputs):
        raise PolicyError(f"rule {rule.name!r} returned {len(gradients)} gradients for {len(inputs)} inputs")
    flat = []
    for number in numbers:
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
    forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], numbers: list[int]
) -> tuple[Tensor, Tensor]:
    """The transposed Jacobian by central differences, and which entries lie at a kink or jump.

    Where the forward is smooth, what the differences to either side disagree by shrinks with the step.
    """
    centre = forward(*inputs).flatten()
    rows, kinks = [], []
    for number in numbers:
        for entry in range(inputs[number].numel()):
            step = _STEP * max(1.0, abs(inputs[number].flatten()[entry].item()))
            gaps = []
            for length in (step / 4, step):
                above = forward(*_moved(inputs, number, entry, length)).flatten()
                below = forward(*_moved(inputs, number, entry, -length)).flatten()
                central = (above - below) / (2 * length)
                gaps.append((above - 2 * centre + below).abs() / length)
            rows.append(central)
            large = gaps[1] > 1e-4 * central.abs().clamp(min=1.0)
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
