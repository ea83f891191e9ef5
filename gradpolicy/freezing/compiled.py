"""Which parameters are in code that ``torch.compile`` makes."""

from types import FunctionType
from typing import Any

import torch
from torch import nn

FOLLOWS_REQUIRES_GRAD = torch.__version__ >= (2, 12)  # type: ignore[operator]
"""Whether compiled code is made anew where a parameter's ``requires_grad`` has changed.

Torch 2.11 goes on with what it made: a layer that was frozen then gets no gradient when it thaws
(pytorch#139476).
"""


def compiled_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters in modules that are compiled, or have a method that is.

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
    """Whether this very module is compiled: as a whole, in place, or by a method in its ``__dict__``."""
    whole = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return whole or any(_is_compiled(call) for call in vars(module).values())


def _is_compiled(call: Any) -> bool:
    """Whether a function is compiled, also under what was wrapped round it."""
    while call is not None:
        if isinstance(call, FunctionType) and hasattr(call, "_torchdynamo_orig_callable"):
            return True
        call = getattr(call, "__wrapped__", None) if callable(call) else None
    return False
