"""Rules for ReLU and its smooth relatives.

A ReLU's own gradient is gated by its *input*: ``relu'(x) · grad``. Guided backpropagation also gates by the
sign of the *gradient*, deconvnet backpropagation only by the gradient. Redirected ReLU passes the gradient
ungated if a sample would get none at all.

For other rectifiers, which have no sharp threshold, the rules are generalised as follows:

- *Guided* is the operation's own gradient of the positive part of the incoming gradient: ``f'(x) · max(grad,
  0)``, with the f' of GELU, SiLU or LeakyReLU. Where f' is negative (GELU below −0.75, SiLU below −1.28) a
  small negative gradient remains, of at most 0.13 and 0.10 of the incoming one; LeakyReLU passes its negative
  slope times the positive part.
- *Deconv* ignores the input, so it is ``max(grad, 0)`` for every rectifier.
"""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Inputs, rule
from gradpolicy.rules.routing import first_input, to_first


def positive_part(grad: Tensor) -> Tensor:
    """Return ``max(grad, 0)``, the filter of guided backpropagation."""
    # Equal to clamp(min=0), in half the time.
    return torch.relu(grad)


@rule("guided_relu", gradient_filter=positive_part, reads=("output",))
def guided_relu(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    """Pass only positive gradients, where the input was positive: guided backpropagation.

    =============================== ===============================================
    forward                         backward
    =============================== ===============================================
    ``y = max(x, 0)``               ``grad_x = 1[x > 0] · max(grad_y, 0)``
    any other rectifier ``y=f(x)``  ``grad_x = f'(x) · max(grad_y, 0)``
    =============================== ===============================================

    The second line applies if the rule is used at an operation by ``gradient_override`` or a policy. Called
    directly, the rule is the first line.

    Source: Springenberg, Dosovitskiy, Brox, Riedmiller 2015, arXiv:1412.6806.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
        >>> with gp.gradient_override({"relu": "guided_relu"}):
        ...     y = torch.relu(x)
        >>> (y * torch.tensor([1.0, 1.0, -1.0])).sum().backward()
        >>> x.grad
        tensor([0., 1., 0.])
    """
    return to_first(torch.where(output <= 0, torch.zeros_like(grad), positive_part(grad)), inputs)


@rule("deconv_relu", reads=())
def deconv_relu(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    """Pass only positive gradients, whatever the input was: deconvnet backpropagation.

    =============================== ===============================================
    forward                         backward
    =============================== ===============================================
    ``y = f(x)``, any rectifier     ``grad_x = max(grad_y, 0)``
    =============================== ===============================================

    Source: Zeiler, Fergus 2014, arXiv:1311.2901.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
        >>> with gp.gradient_override({"relu": "deconv_relu"}):
        ...     y = torch.relu(x)
        >>> (y * torch.tensor([1.0, 1.0, -1.0])).sum().backward()
        >>> x.grad
        tensor([1., 1., 0.])
    """
    return to_first(positive_part(grad), inputs)


@rule("redirected_relu")
def redirected_relu(grad: Tensor, inputs: Inputs, output: Tensor) -> Any:
    """Bypass a ReLU that would block all gradients of a sample: redirected ReLU.

    =============================== ==================================================================
    forward                         backward
    =============================== ==================================================================
    ``y = max(x, 0)``               ``own = 1[x > 0] · grad_y``; for each sample (first dimension):
                                    ``grad_x = own`` where any entry of own is not 0, otherwise
                                    ``grad_x = 0`` where ``x < 0`` and ``grad_y > 0``, else ``grad_y``
    =============================== ==================================================================

    It is for feature visualisation, which starts from images that activate no unit. A descent step along this
    gradient can only increase inputs below 0. Use it for the first steps only: ``When(stop=16)``.

    Source: Olah, Mordvintsev, Schubert 2017, "Feature Visualization", doi:10.23915/distill.00007, and the
    ``redirected_relu_grad`` of its library Lucid.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([[-1.0, -2.0], [-1.0, 2.0]], requires_grad=True)
        >>> with gp.gradient_override({"relu": "redirected_relu"}):
        ...     y = torch.relu(x)
        >>> (-y).sum().backward()
        >>> x.grad
        tensor([[-1., -1.],
                [ 0., -1.]])
    """
    zeros = torch.zeros_like(grad)
    own = torch.where(output <= 0, zeros, grad)
    redirected = torch.where((first_input(inputs) < 0) & (grad > 0), zeros, grad)
    passes = own != 0
    within_sample = tuple(range(1, grad.dim()))
    if within_sample:
        passes = passes.any(dim=within_sample, keepdim=True)
    return to_first(torch.where(passes, own, redirected), inputs)
