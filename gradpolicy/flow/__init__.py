"""Puts rules on a model and takes them off: operations, module boundaries, parameters."""

from gradpolicy.flow.apply import apply
from gradpolicy.flow.install import Installed, install
from gradpolicy.flow.override import gradient_override

__all__ = ["Installed", "apply", "gradient_override", "install"]
