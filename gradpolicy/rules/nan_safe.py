"""A rule for branches that a mask leaves out, whose gradient is NaN."""

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Call, Inputs, rule


@rule("nan_safe", reads=("inputs",))
def nan_safe(grad: Tensor, inputs: Inputs, output: Tensor, *, call: Call) -> tuple[Tensor | None, ...]:
    """Pass the operation's own gradient, and 0 where the incoming gradient is 0 and that is infinite or NaN.

    ====================== =========================================================
    forward                backward
    ====================== =========================================================
    ``y = f(x)``           ``grad_x = f'(x) · grad_y``, and 0 where ``grad_y = 0``
    \\                      and ``f'(x) · grad_y`` is not finite
    ====================== =========================================================

    It equals a second ``where`` before the operation, in second derivatives too.

    Source: pytorch#52248.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([-1.0, 0.0, 4.0], requires_grad=True)
        >>> with gp.gradient_override({"sqrt": "nan_safe"}):
        ...     torch.where(x > 0, torch.sqrt(x), 0.0).sum().backward()
        >>> x.grad
        tensor([0.0000, 0.0000, 0.2500])
    """
    if call.derivative is None:
        raise PolicyError("there is no operation here whose own derivative it could pass")
    inputs = torch.broadcast_tensors(*inputs)
    zero = grad == 0
    missing = call.arguments.get("dim") if zero.dim() < inputs[0].dim() else None
    if missing is not None:  # a reduction without keepdim
        listed = [missing] if isinstance(missing, int) else missing
        for dim in sorted(each % inputs[0].dim() for each in listed):
            zero = zero.unsqueeze(dim)
    own = [each for each in call.derivative(grad, inputs, output, call=call) if each is not None]
    bad = zero & ~torch.stack([each.detach().isfinite() for each in own]).all(0)
    # Second derivatives by the inputs are 0 there too. Almost every function is smooth at 0.5.
    safe = tuple(torch.where(zero, torch.where(bad, 0.5, each.detach()), each) for each in inputs)
    found = call.derivative(grad, safe, output, call=call)
    return tuple(each if each is None else torch.where(bad, 0.0, each) for each in found)
