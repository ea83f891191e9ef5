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
    dividing = {
        id(parameter): type(optimizer).__name__
        for optimizer in optimizers
        if divides_out(optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, policy in policies.items():
        if not isinstance(policy, FlowPolicy) or not policy.params or policy.rule.name not in _RULES:
            continue
        factor = policy.rule.parameters["factor"]
        changes = callable(factor) or isinstance(factor, Tensor)
        matched = [p for p in pick(parameters, policy.params).values() if id(p) in dividing]
        if matched and (changes or abs(factor) not in (0.0, 1.0)):
            kind = "scheduled factor" if callable(factor) else "factor" if changes else f"factor {factor:g}"
            yield (
                f"{name}: {dividing[id(matched[0])]} divides the {kind} on the gradients of parameters out "
                "again; give these parameters a learning rate of their own (gradpolicy.Rates), or train with "
                "SGD"
            )
