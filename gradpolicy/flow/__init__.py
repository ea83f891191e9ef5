"""Applies backward rules to operations, module boundaries and parameters."""

from gradpolicy.flow.apply import apply
from gradpolicy.flow.gradcheck_rule import gradcheck_rule
from gradpolicy.flow.install import Installed, install
from gradpolicy.flow.override import gradient_override

__all__ = ["Installed", "apply", "gradcheck_rule", "gradient_override", "install"]
