"""Sets policies aside that are installed already, for a plan of what they do."""

from collections.abc import Collection

from torch import nn

from gradpolicy.flow.session import Owner
from gradpolicy.flow.wrapped_forward import WrappedForward
from gradpolicy.policies import Policy


def set_aside(model: nn.Module, policies: Collection[Policy]) -> None:
    """Switches off, on a copy of a model, those of its policies that are about to be installed anew.

    Other policies stay: what they do belongs to what will happen.

    Args:
        model: The copy.
        policies: The policies that are to be installed on it.
    """
    written = {repr(policy) for policy in policies}
    for owner in _owners(model):
        for binding in owner.bindings:
            if binding.written in written:
                binding.active = False


def _owners(model: nn.Module) -> list[Owner]:
    found: dict[int, Owner] = {}
    for module in model.modules():
        for wrap in list(module.__dict__.values()):
            while isinstance(wrap, WrappedForward):
                found[id(wrap.owner)] = wrap.owner
                wrap = wrap.inner
    return list(found.values())
