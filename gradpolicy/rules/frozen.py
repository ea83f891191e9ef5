"""Rules that hold a factor constant: the weights of attention, the scale of a norm."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Call, Inputs, Rule
from gradpolicy.rules.routing import zeros_for


def frozen_attention(own: tuple[Tensor | None, ...], inputs: Inputs, output: Tensor) -> Any:
    """Hold attention weights constant: the gradient passes through the values only.

    ======================================== ================================================
    forward                                  backward
    ======================================== ================================================
    ``scaled_dot_product_attention(q, k, v)`` ``grad_v`` as ever, ``grad_q = grad_k = 0``
    ``y = softmax(x)``                       ``grad_x = 0``
    ======================================== ================================================

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with gp.gradient_override({"softmax": FROZEN_ATTENTION}):
        ...     (torch.softmax(x, 0) * x).sum().backward()
        >>> x.grad.equal(torch.softmax(x, 0))
        True
    """
    return tuple(grad if place == 2 or grad is None else zeros_for(grad) for place, grad in enumerate(own))


def frozen_scale(grad: Tensor, inputs: Inputs, output: Tensor, *, call: Call) -> Any:
    """Hold the scale of a norm constant: its standard deviation, root mean square or length.

    ================================= =====================================================
    forward                           backward
    ================================= =====================================================
    ``layer_norm``, ``rms_norm``      that of ``(x − mean(x)) · s · weight + bias`` with a
    \\                                 constant ``s`` (``rms_norm``: without the mean)
    ``normalize``                     ``grad_x = grad_y / max(‖x‖, eps)``
    any other, such as ``rsqrt(x)``   ``grad_x = 0``
    ================================= =====================================================

    Source: Ameisen et al. 2025, "Circuit Tracing", and Ali et al. 2022, arXiv:2202.07304.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with gp.gradient_override({"normalize": FROZEN_SCALE}):
        ...     torch.nn.functional.normalize(x, dim=0).sum().backward()
        >>> x.grad
        tensor([0.2000, 0.2000])
    """
    given = call.arguments
    if call.operation == "normalize":
        length = inputs[0].norm(given["p"], given["dim"], keepdim=True)
        return grad / length.clamp_min(given["eps"])
    if "normalized_shape" not in given:
        return tuple(map(zeros_for, inputs))
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    last = tuple(range(-len(given["normalized_shape"]), 0))
    leading = tuple(range(x.dim() - len(last)))
    eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
    x, grad = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (x, grad))
    centred = x - x.mean(last, keepdim=True) if call.operation == "layer_norm" else x
    scale = torch.rsqrt(centred.square().mean(last, keepdim=True) + eps).detach()
    scaled = scale * (grad if weight is None else grad * weight)
    found = [scaled - scaled.mean(last, keepdim=True) if call.operation == "layer_norm" else scaled]
    found += [] if weight is None else [(grad * centred * scale).sum(leading)]
    found += [] if bias is None else [grad.sum(leading)]
    return tuple(found)


FROZEN_ATTENTION = Rule("frozen attention", frozen_attention, reads=(), own=True)
FROZEN_SCALE = Rule("frozen scale", frozen_scale, reads=("inputs",))
