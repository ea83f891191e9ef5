"""Gradient policies for PyTorch and Lightning: where, what and when to change the gradient.

Example:
    >>> import torch, gradpolicy as gp
    >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
    >>> with gp.gradient_override({"round": "identity"}):
    ...     y = torch.round(x)
    >>> y.sum().backward()
    >>> x.grad
    tensor([1., 1.])
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradpolicy.errors import PolicyError
from gradpolicy.when import When

if TYPE_CHECKING:
    from gradpolicy import delta, masks, schedules
    from gradpolicy.flow.apply import apply
    from gradpolicy.flow.gradcheck_rule import gradcheck_rule
    from gradpolicy.flow.install import install
    from gradpolicy.flow.override import gradient_override
    from gradpolicy.insight import curvature
    from gradpolicy.lightning.callback import GradientPolicies
    from gradpolicy.optim import MaskedOptimizer, Optimizers, UpdateRule, update_rule
    from gradpolicy.planning.plan import plan
    from gradpolicy.policies import (
        Clip,
        Deconv,
        ForwardMask,
        Freeze,
        Guided,
        Reverse,
        Scale,
        Stop,
        StraightThrough,
        Train,
        UseRule,
    )
    from gradpolicy.rates import LayerDecay, Rates
    from gradpolicy.rules import Rule, get_rule, rule, rule_names
    from gradpolicy.rules.derivative import gradient_of
    from gradpolicy.rules.registry import Call
    from gradpolicy.training_loop import training

__version__ = "0.1.0"

# The module of each public name, which is loaded on first use. Importing the package does not load torch, so
# that errors in a command line are reported at once.
_HOMES = {
    "GradientPolicies": "gradpolicy.lightning.callback",
    "apply": "gradpolicy.flow",
    "gradient_override": "gradpolicy.flow",
    "install": "gradpolicy.flow",
    **dict.fromkeys(("MaskedOptimizer", "Optimizers", "UpdateRule", "update_rule"), "gradpolicy.optim"),
    **dict.fromkeys(("LayerDecay", "Rates"), "gradpolicy.rates"),
    "gradcheck_rule": "gradpolicy.flow",
    "plan": "gradpolicy.planning.plan",
    "Call": "gradpolicy.rules.registry",
    "gradient_of": "gradpolicy.rules.derivative",
    "training": "gradpolicy.training_loop",
    **dict.fromkeys(("Rule", "get_rule", "rule", "rule_names"), "gradpolicy.rules"),
    **dict.fromkeys(
        (
            "Clip",
            "Deconv",
            "ForwardMask",
            "Freeze",
            "Guided",
            "Reverse",
            "Scale",
            "Stop",
            "StraightThrough",
            "Train",
            "UseRule",
        ),
        "gradpolicy.policies",
    ),
}
_MODULES = {
    "curvature": "gradpolicy.insight.curvature",
    **{name: f"gradpolicy.{name}" for name in ("delta", "masks", "rules", "schedules")},
}

__all__ = [
    "Call",
    "Clip",
    "Deconv",
    "ForwardMask",
    "Freeze",
    "GradientPolicies",
    "Guided",
    "LayerDecay",
    "MaskedOptimizer",
    "Optimizers",
    "PolicyError",
    "Rates",
    "Reverse",
    "Rule",
    "Scale",
    "Stop",
    "StraightThrough",
    "Train",
    "UpdateRule",
    "UseRule",
    "When",
    "apply",
    "curvature",
    "delta",
    "get_rule",
    "gradcheck_rule",
    "gradient_of",
    "gradient_override",
    "install",
    "masks",
    "plan",
    "rule",
    "rule_names",
    "schedules",
    "training",
    "update_rule",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradpolicy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
