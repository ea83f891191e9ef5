"""The table of update rules: one file a family of optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from gradpolicy.errors import PolicyError
from gradpolicy.optim.update_rules.adagrad import Adagrad
from gradpolicy.optim.update_rules.adam import Adam, Adamax, NAdam, RAdam
from gradpolicy.optim.update_rules.base import Group, State, UpdateRule
from gradpolicy.optim.update_rules.lion import Lion
from gradpolicy.optim.update_rules.rmsprop import RMSprop
from gradpolicy.optim.update_rules.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from gradpolicy.optim.update_rules.sgd import SGD

__all__ = ["Group", "State", "UpdateRule", "is_torchs_own", "rule_for", "update_rule"]

RULES: dict[str, type[UpdateRule]] = {
    "torch.optim.Adam": Adam,
    "torch.optim.AdamW": Adam,
    "torch.optim.SGD": SGD,
    "torch.optim.RMSprop": RMSprop,
    "torch.optim.Adagrad": Adagrad,
    "torch.optim.NAdam": NAdam,
    "torch.optim.RAdam": RAdam,
    "torch.optim.Adamax": Adamax,
    "pytorch_optimizer.Lion": Lion,
    "schedulefree.AdamWScheduleFree": ScheduleFreeAdamW,
    "schedulefree.SGDScheduleFree": ScheduleFreeSGD,
}
"""By package and name of the optimizer, so that none of these packages must be imported."""
_REGISTERED: dict[type[torch.optim.Optimizer], type[UpdateRule]] = {}


def update_rule(
    optimizer_class: type[torch.optim.Optimizer],
) -> Callable[[type[UpdateRule]], type[UpdateRule]]:
    """Make MaskedOptimizer exact for your own optimizer; decorate an `UpdateRule` that describes it.

    Args:
        optimizer_class: The class of the optimizer.

    Raises:
        PolicyError: If this is no optimizer class, or the decorated class is no UpdateRule.

    Example:
        >>> import gradpolicy as gp
        >>> class SignSGD(torch.optim.Optimizer):
        ...     def __init__(self, params, lr):
        ...         super().__init__(params, {"lr": lr})
        ...     def step(self):
        ...         for group in self.param_groups:
        ...             for parameter in group["params"]:
        ...                 parameter.data -= group["lr"] * parameter.grad.sign()
        >>> @gp.update_rule(SignSGD)
        ... class SignRule(gp.UpdateRule):
        ...     def state(self, group):
        ...         return {}
        ...     def settings(self, group):
        ...         return (1.0, group["lr"])
        ...     def update(self, parameter, gradient, state, settings, numbers):
        ...         sign, lr = settings
        ...         return parameter - lr * (sign * gradient).sign(), state
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise PolicyError(f"update_rule: a class of optimizers is needed, got {optimizer_class!r}")

    def register(rule: type[UpdateRule]) -> type[UpdateRule]:
        if not (isinstance(rule, type) and issubclass(rule, UpdateRule)):
            raise PolicyError(f"update_rule: it decorates a subclass of gradpolicy.UpdateRule, got {rule!r}")
        _REGISTERED[optimizer_class] = rule
        return rule

    return register


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the rule that describes an optimizer's own `step`; None if there is none."""
    kind = type(optimizer)
    step = inspect.unwrap(kind.step)
    for each in kind.__mro__:
        known = _REGISTERED.get(each) or RULES.get(f"{_package(each)}.{each.__name__}")
        if known is not None and inspect.unwrap(each.step) is step:  # type: ignore[attr-defined]
            rule = known(optimizer)
            return rule if all(map(rule.supports, optimizer.param_groups)) else None
    return None


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for one of torch's optimizers whose state belongs to single parameters (all but LBFGS)."""
    # The module of Adafactor and Muon is the package, that of others a module in it.
    of_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return of_torch and type(optimizer) is not torch.optim.LBFGS


def _package(kind: type) -> str:
    """Return `torch.optim` for a class of `torch.optim.adam`; of other packages the first part alone."""
    parts = kind.__module__.split(".")
    return ".".join(parts[:2]) if parts[0] == "torch" else parts[0]
