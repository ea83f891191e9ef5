"""Rules that clip or normalise the gradient."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Inputs, rule
from gradpolicy.rules.routing import Number, on_device_of, to_first


@rule("clip_value", reads=(), each=True)
def clip_value(
    grad: Tensor, inputs: Inputs, output: Tensor, *, value: Number, loss_scale: Number = 1.0
) -> Any:
    """Clip every entry of the gradient to an interval around 0.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = f(x)``           ``grad_x = min(max(grad_y, −value), value)``
    ====================== =====================================================

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        value: The largest absolute value of an entry, above 0.
        loss_scale: The factor of the loss in fp16 training; the bound is multiplied by it too.

    Source: Mikolov 2012 (clipping in recurrent networks); element-wise here, at one location in the graph.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> clip = gp.get_rule("clip_value", value=0.5)
        >>> (gp.apply(clip, torch.clone, x) * torch.tensor([3.0, -0.1])).sum().backward()
        >>> x.grad
        tensor([ 0.5000, -0.1000])
    """
    bound = on_device_of(value * loss_scale, grad)
    if not isinstance(bound, Tensor) and bound > torch.finfo(grad.dtype).max:
        return to_first(grad, inputs)
    return to_first(torch.clamp(grad, min=-bound, max=bound).to(grad.dtype), inputs)


@rule("clip_norm", reads=(), each=True)
def clip_norm(
    grad: Tensor,
    inputs: Inputs,
    output: Tensor,
    *,
    norm: Number,
    per_sample: bool = False,
    loss_scale: Number = 1.0,
) -> Any:
    """Scale the gradient down to a Euclidean norm if its norm is larger; its direction does not change.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = f(x)``           ``grad_x = grad_y · min(1, norm / ‖grad_y‖₂)``
    ====================== =====================================================

    A gradient that is not finite passes unchanged, so that fp16 training detects it and skips the step.

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        norm: The largest norm, above 0.
        per_sample: Clip each index of the first dimension separately.
        loss_scale: The factor of the loss in fp16 training; the bound is multiplied by it too.

    Source: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> clip = gp.get_rule("clip_norm", norm=1.0)
        >>> (gp.apply(clip, torch.clone, x) * torch.tensor([3.0, 4.0])).sum().backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    return to_first(_with_length(grad, norm * loss_scale, per_sample, only_shorten=True), inputs)


@rule("normalize", reads=(), each=True)
def normalize(
    grad: Tensor,
    inputs: Inputs,
    output: Tensor,
    *,
    norm: Number = 1.0,
    per_sample: bool = False,
    loss_scale: Number = 1.0,
) -> Any:
    """Scale the gradient to a Euclidean norm; its direction does not change.

    ====================== =====================================================
    forward                backward
    ====================== =====================================================
    ``y = f(x)``           ``grad_x = norm · grad_y / ‖grad_y‖₂``, and 0 for 0
    ====================== =====================================================

    A gradient that is not finite passes unchanged, so that fp16 training detects it and skips the step.

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        norm: The norm, above 0.
        per_sample: Normalise each index of the first dimension separately.
        loss_scale: The factor of the loss in fp16 training; the norm is multiplied by it too.

    Source: Yu et al. 2017 (block-normalized gradient method), arXiv:1707.04822; here at one location
    in the graph.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> (gp.apply("normalize", torch.clone, x) * torch.tensor([3.0, 4.0])).sum().backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    return to_first(_with_length(grad, norm * loss_scale, per_sample, only_shorten=False), inputs)


def _with_length(grad: Tensor, wanted: Number, per_sample: bool, *, only_shorten: bool) -> Tensor:
    """Return the gradient, or each entry of its first dimension, scaled to a length.

    Rows are divided by their largest entry first, so that no square overflows, in fp16 either. A row that is
    not finite is returned as it is, and so is one that is short enough where rows are only to be shortened.
    """
    if grad.numel() == 0:
        return grad
    rows = grad.reshape(grad.shape[0] if per_sample and grad.dim() else 1, -1)
    # On a processor the infinity norm takes ten times as long.
    largest = rows.detach().abs().amax(dim=1, keepdim=True)
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    changes = torch.isfinite(largest)
    unit = torch.where(changes & (largest > 0), largest, 1.0)
    precise = torch.promote_types(rows.dtype, torch.float32)
    # At least 1, since one entry of the divided row is: so a row of zeros needs no case of its own.
    length = torch.linalg.vector_norm(rows / unit, dim=1, keepdim=True, dtype=precise).clamp(min=1.0)
    wanted = on_device_of(wanted, rows)
    if only_shorten:
        changes = changes & (length * unit > wanted)
    return torch.where(changes, rows / unit / length * wanted, rows).to(grad.dtype).reshape(grad.shape)
