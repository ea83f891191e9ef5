"""Turns ``requires_grad`` off for a while, so that the backward pass skips frozen tensors."""

from collections.abc import Collection, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

FOLLOWS_REQUIRES_GRAD = torch.__version__ >= (2, 12)  # type: ignore[operator]
"""True if compiled code is made anew where a parameter's ``requires_grad`` has changed.

Torch 2.11 goes on with what it made: a layer that was frozen then gets no gradient when it thaws
(pytorch#139476).
"""
# The mark of a parameter whose requires_grad is off for a while: it trains, though not just now.
_TURNED_OFF = "_gradient_turned_off"


class RequiresGrad:
    """Turns the ``requires_grad`` of parameters off and on again.

    Parameters whose ``requires_grad`` was off already are never touched. If nothing of an optimizer's
    parameters, which may have a loss of their own, would be left for a backward pass, all of them stay on:
    masks alone keep the values then.

    Args:
        parameters: All parameters of the model by name, in model order.
        groups: The parameters of each optimizer.
    """

    def __init__(self, parameters: Mapping[str, Tensor], groups: Iterable[Collection[Tensor]] = ()) -> None:
        self.parameters = dict(parameters)
        self._groups = [{name for name, p in parameters.items() if p in group} for group in groups]
        self._turned_off: set[str] = set()

    def turn_off(self, idle: set[str]) -> None:
        """Turn exactly these off; others that were turned off before come on again."""
        for group in self._groups:
            if not any(name not in idle and self._can_train(name) for name in group):
                idle = idle - group
        for name in sorted(self._turned_off - idle):
            _turn_on(self.parameters[name])
            self._turned_off.discard(name)
        for name in self.parameters:
            if name in idle and self.parameters[name].requires_grad:
                self.parameters[name].requires_grad_(False)
                setattr(self.parameters[name], _TURNED_OFF, True)
                # A stale gradient would still count in clipping and in the update.
                self.parameters[name].grad = None
                self._turned_off.add(name)

    def restore(self) -> None:
        """Turn on again what was turned off here."""
        for name in self._turned_off:
            _turn_on(self.parameters[name])
        self._turned_off = set()

    def _can_train(self, name: str) -> bool:
        return self.parameters[name].requires_grad or name in self._turned_off


def is_turned_off(parameter: Tensor) -> bool:
    """Return True if a parameter's ``requires_grad`` was turned off here for a while."""
    return hasattr(parameter, _TURNED_OFF)


def _turn_on(parameter: Tensor) -> None:
    parameter.requires_grad_(True)
    parameter.__dict__.pop(_TURNED_OFF, None)


def compiled_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters in modules that are compiled, or have a method that is.

    Not those in a function that somebody else compiles: a module does not know of it.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 1), backend="eager"))
        >>> len(compiled_parameters(model))
        2
    """
    by_class: dict[type, bool] = {}
    for kind in {type(module) for module in model.modules()}:
        by_class[kind] = any(_is_compiled(call) for base in kind.__mro__ for call in vars(base).values())
    return {
        id(parameter)
        for module in model.modules()
        if by_class[type(module)] or _compiles_its_own(module)
        for parameter in module.parameters()
    }


def _compiles_its_own(module: nn.Module) -> bool:
    """Return True if this very module is compiled: as a whole, in place, or by a method of its own."""
    whole = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return whole or any(_is_compiled(call) for call in vars(module).values())


def _is_compiled(call: Any) -> bool:
    """Return True if a function, or one that it wraps, is compiled."""
    while call is not None:
        if isinstance(call, FunctionType) and hasattr(call, "_torchdynamo_orig_callable"):
            return True
        call = getattr(call, "__wrapped__", None) if callable(call) else None
    return False
