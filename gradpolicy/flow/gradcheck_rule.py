"""How far a rule is from the true gradient, for whatever ``apply`` takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.flow.apply import call_of, check_forward, replacing_rule, run_forward
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.rules.gradcheck import Outcomes, RuleCheck, Subject, check_rule
from gradpolicy.rules.registry import Rule, RuleFunction


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
    """Compares a rule with central finite differences, in double precision where the forward takes it.

    Both gradients are taken for random incoming gradients, ``vᵀ ∂forward/∂input``. A rule that departs on
    purpose does not fail: the result says how far, and in which direction.

    For a *step function* (round, sign, floor …) the true gradient is 0 wherever it exists. Every
    straight-through rule then "passes gradient where the true one is 0", which is what it is for. To check
    its formula, give the smooth stand-in as the forward: ``gradcheck_rule("tanh", torch.tanh, x)`` is exact.

    For a *random* forward give ``outcomes``. The rule's expected gradient, over all outcomes, is then
    compared with the gradient of the expected loss.

    Args:
        rule: What :func:`gradpolicy.apply` takes: a registered name, a dotted path, a
            :class:`~gradpolicy.Rule`, a function, or another operation.
        forward: The operation: any function that :func:`gradpolicy.apply` takes; evaluated about four times
            an input entry.
        inputs: Its one argument, or a tuple of them. Floating-point tensors are taken to float64, unless the
            forward fails with these; a single array is taken for a tensor.
        numpy: Whether the forward gets arrays, as for :func:`gradpolicy.apply`.
        outcomes: ``outcomes(*inputs)`` gives every possible output with its probability, differentiable
            in the mathematical sense: pairs ``(probability, output)``. ``enumerate_bits`` and
            ``enumerate_categories`` of :mod:`gradpolicy.rules.gradcheck` are ready ones.
        loss: With outcomes: a scalar function of the output. Unless given, random linear functions.
        cotangents: How many random incoming gradients to try.
        tolerance: The largest deviation that counts as exact, relative to the largest true gradient. Unless
            given it follows the precision in which the forward computes: 1e-6 for float64, 1e-2 for float32,
            1e-1 below. The result says it.
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
    check_forward("gradcheck_rule", forward)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors_in(args):
        args = tuple(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args)
    args = map_tensors(Tensor.detach, args)

    def evaluate(*tensors: Tensor) -> Any:
        with torch.no_grad():
            return run_forward(forward, _with_tensors(args, tensors), {}, numpy)

    given = tuple(tensors_in(args))
    exact = _in_double(given, evaluate if outcomes is None else None)
    call = call_of(forward, _with_tensors(args, exact), {})
    return check_rule(
        Subject(replacing_rule("gradcheck_rule", rule), evaluate, exact, call),
        outcomes=outcomes,
        loss=loss,
        cotangents=cotangents,
        tolerance=tolerance,
        seed=seed,
    )


def _in_double(tensors: tuple[Tensor, ...], evaluate: Callable[..., Any] | None) -> tuple[Tensor, ...]:
    """The tensors in float64; as they are where a forward fails with these."""
    exact = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)
    if evaluate is not None and any(one is not two for one, two in zip(exact, tensors, strict=True)):
        try:
            evaluate(*exact)
        except RuntimeError:
            # It computes with tensors of its own in another precision.
            return tensors
    return exact


def _with_tensors(args: tuple, tensors: tuple[Tensor, ...]) -> tuple:
    """The arguments with their tensors replaced, in order."""
    left = iter(tensors)
    return map_tensors(lambda _: next(left), args)
