"""Modules of torch whose forward calls known functions only, so that no mode need look on.

A mode costs a little at every torch function that runs under it. Below a ``nn.Sequential`` of known layers it
is not needed: those that call an operation with a rule do so through their own wrapped forward.
"""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from gradpolicy.flow.operations import Function

_NORM = (F.batch_norm, Tensor.add_, Tensor.add)

# What the forward of exactly these classes calls.
_CALLS: dict[type[nn.Module], tuple[Function, ...]] = {
    nn.AdaptiveAvgPool2d: (F.adaptive_avg_pool2d,),
    nn.AvgPool2d: (F.avg_pool2d,),
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.Conv1d: (F.conv1d, F.pad),
    nn.Conv2d: (F.conv2d, F.pad),
    nn.Conv3d: (F.conv3d, F.pad),
    nn.Dropout: (F.dropout,),
    nn.Embedding: (F.embedding,),
    nn.Flatten: (Tensor.flatten,),
    nn.GroupNorm: (F.group_norm,),
    nn.Identity: (),
    nn.LayerNorm: (F.layer_norm,),
    nn.Linear: (F.linear,),
    nn.ReLU: (F.relu,),
}


def calls_of(module: nn.Module) -> tuple[Function, ...] | None:
    """The torch functions that a module's forward calls; None where that is not known."""
    return None if "forward" in module.__dict__ else _CALLS.get(type(module))


def known_below(module: nn.Module) -> list[nn.Module]:
    """The modules in a ``nn.Sequential``, where all of them are known; otherwise none."""
    if type(module) is not nn.Sequential or "forward" in module.__dict__:
        return []
    found: list[nn.Module] = []
    for child in module.children():
        below = known_below(child)
        if not below and calls_of(child) is None:
            return []
        found += [child, *below]
    return found


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether forward hooks, which may call anything, hang on some of the modules."""
    anywhere: Any = module_globals
    if anywhere._global_forward_hooks or anywhere._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)
