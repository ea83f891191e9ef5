"""Modules of torch whose forward calls known functions only."""

import torch.nn.functional as F
from torch import Tensor, nn

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
