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

from gradpolicy.errors import PolicyError as PolicyError
from gradpolicy.when import When as When

if TYPE_CHECKING:
    from gradpolicy import delta as delta
    from gradpolicy import masks as masks
    from gradpolicy import presets as presets
    from gradpolicy import schedules as schedules
    from gradpolicy.flow.apply import apply as apply
    from gradpolicy.flow.gradcheck_rule import gradcheck_rule as gradcheck_rule
    from gradpolicy.flow.install import install as install
    from gradpolicy.flow.override import gradient_override as gradient_override
    from gradpolicy.insight import curvature as curvature
    from gradpolicy.optim import MaskedOptimizer as MaskedOptimizer
    from gradpolicy.optim import Optimizers as Optimizers
    from gradpolicy.optim import UpdateRule as UpdateRule
    from gradpolicy.optim import update_rule as update_rule
    from gradpolicy.planning.plan import plan as plan
    from gradpolicy.policies import Clip as Clip
    from gradpolicy.policies import Deconv as Deconv
    from gradpolicy.policies import Freeze as Freeze
    from gradpolicy.policies import Guided as Guided
    from gradpolicy.policies import Reverse as Reverse
    from gradpolicy.policies import Scale as Scale
    from gradpolicy.policies import Stop as Stop
    from gradpolicy.policies import StraightThrough as StraightThrough
    from gradpolicy.policies import Train as Train
    from gradpolicy.policies import UseRule as UseRule
    from gradpolicy.rates import LayerDecay as LayerDecay
    from gradpolicy.rates import Rates as Rates
    from gradpolicy.rules import Rule as Rule
    from gradpolicy.rules import get_rule as get_rule
    from gradpolicy.rules import rule as rule
    from gradpolicy.rules import rule_names as rule_names
    from gradpolicy.rules.derivative import gradient_of as gradient_of
    from gradpolicy.rules.registry import Call as Call
    from gradpolicy.train.lightning.callback import GradientPolicies as GradientPolicies
    from gradpolicy.train.loop import training as training

__version__ = "0.1.0"

# The public names by module, which is loaded on first use. Importing the package does not load torch, so that
# errors in a command line are reported at once.
_NAMES = {
    "flow": "apply gradient_override install gradcheck_rule",
    "train.lightning.callback": "GradientPolicies",
    "optim": "MaskedOptimizer Optimizers UpdateRule update_rule",
    "planning.plan": "plan",
    "policies": "Clip Deconv Freeze Guided Reverse Scale Stop StraightThrough Train UseRule",
    "rates": "LayerDecay Rates",
    "rules": "Rule get_rule rule rule_names",
    "rules.derivative": "gradient_of",
    "rules.registry": "Call",
    "train.loop": "training",
}
_HOMES = {name: f"gradpolicy.{module}" for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "curvature": "gradpolicy.insight.curvature",
    **{name: f"gradpolicy.{name}" for name in ("delta", "masks", "presets", "rules", "schedules")},
}

__all__ = sorted([*_HOMES, "PolicyError", "When", "curvature", "delta", "masks", "presets", "schedules"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradpolicy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
