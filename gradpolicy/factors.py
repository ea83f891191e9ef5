"""Finds factors on gradients that an optimizer divides out again."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.policies import FlowPolicy, Policy
from gradpolicy.where import pick

# Parts of the names of optimizers, torch's and others', whose update is invariant to the gradient's scale.
_DIVIDING = (
    *("adadelta", "adafactor", "adagrad", "adam", "adan", "adopt", "lamb"),
    *("lion", "muon", "prodigy", "rmsprop", "rprop", "signsgd", "sophia"),
)
_RULES = ("scale", "reverse")


def divides_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer divides a constant factor on all gradients of a parameter out again.

    Example:
        >>> weight = [torch.nn.Parameter(torch.zeros(2))]
        >>> divides_out(torch.optim.AdamW(weight)), divides_out(torch.optim.SGD(weight))
        (True, False)
    """
    names = [base.__name__.lower() for base in type(optimizer).__mro__]
    return any(part in name for part in _DIVIDING for name in names)


def divided_factors(
    policies: Mapping[str, Policy], parameters: Mapping[str, Tensor], optimizers: Iterable[Any]
) -> Iterator[str]:
    """Yield a line for each policy whose factor an optimizer divides out, with an alternative.

    Args:
        policies: The policies by name.
        parameters: The model's parameters by name.
        optimizers: The optimizers, without wrappers.
    """
    dividing: dict[int, str] = {
        id(parameter): type(optimizer).__name__
        for optimizer in optimizers
        if divides_out(optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, policy in policies.items():
        factor = _factor(policy)
        if factor is None:
            continue
        matched = pick(parameters, policy.params).values()  # type: ignore[attr-defined]
        kind = next((dividing[id(p)] for p in matched if id(p) in dividing), None)
        if kind is not None:
            yield f"{name}: {kind} divides {factor}"


def _factor(policy: Policy) -> str | None:
    """Return a description of the factor of a policy on gradients of parameters, and an alternative."""
    if not isinstance(policy, FlowPolicy) or not policy.params or policy.rule.name not in _RULES:
        return None
    factor = policy.rule.parameters["factor"]
    learnt = isinstance(factor, Tensor)
    if not (learnt or callable(factor)) and abs(float(factor)) in (0.0, 1.0):
        return None
    shown = "the scheduled factor" if callable(factor) else f"the factor{'' if learnt else f' {factor:g}'}"
    return (
        f"{shown} on the gradients of parameters out again; give these parameters a learning rate of their "
        "own (gradpolicy.Rates), or train with SGD"
    )
