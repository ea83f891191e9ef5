"""Works around a crash of torch's GroupNorm behind frozen layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.utils.hooks import RemovableHandle


def guard_group_norms(model: nn.Module) -> list[RemovableHandle]:
    """Keep GroupNorm from crashing where its input needs no gradient.

    In torch 2.13 the backward pass of GroupNorm on a CPU ends the process where the input is in
    channels_last, or is a slice of such a tensor, and needs no gradient, and the norm's own parameters do.
    Exactly there the input is made to ask for one.

    Returns:
        The handles of the forward hooks, to be removed.
    """
    return [
        module.register_forward_pre_hook(_ask_for_input_gradient)
        for module in model.modules()
        if isinstance(module, nn.GroupNorm) and module.affine
    ]


def _ask_for_input_gradient(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not inputs:
        return None
    given = inputs[0]
    if given.requires_grad or given.device.type != "cpu" or not _is_channels_last(given):
        return None
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return (given.detach().requires_grad_(),) if trains else None


def _is_channels_last(tensor: Tensor) -> bool:
    # As GroupNorm decides it: by the order of the strides, so that slices count, but not 1 x 1 images.
    return suggest_memory_format(tensor) is not torch.contiguous_format
