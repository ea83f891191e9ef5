"""Relaxations: gradients of smooth functions that approximate rounding and sorting."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.rules.registry import Call, Inputs, rule
from gradpolicy.rules.routing import Number, check_above_zero, first_input, on_device_of, to_first
from gradpolicy.rules.steps import ROUNDING, from_nearest_step, steps_per_unit


@rule("soft_round")
def soft_round(
    grad: Tensor, inputs: Inputs, output: Tensor, *, temperature: Number = 0.3, call: Call | None = None
) -> Any:
    """Use the gradient of soft rounding, a staircase of tanh curves that becomes rounding as T falls to 0.

    ====================== ==================================================================
    forward                backward
    ====================== ==================================================================
    ``y = round(x)``       ``grad_x = (1 − tanh²(d/T)) / (2 T tanh(1/(2T))) · grad_y``, where d
    (floor, ceil, trunc)   is the distance of x to the nearest step and T the temperature
    ====================== ==================================================================

    A large temperature gives the identity, a small one a peak at each step. The mean over one step is 1.
    Casts to integers are treated as ``trunc``. If the distance between steps is not 1
    (``round(x, decimals=2)``, ``x // n``), d is measured in units of it; ``x // n`` also divides the gradient
    by n. For operations that do not round, the steps are those of ``round``.

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        temperature: T, above 0; may be a schedule: ``gp.schedules.Exponential(1.0, 0.1, steps=1000)``.
        call: The call, which determines the positions of the steps.

    Source: Agustsson, Theis 2020 (universally quantized neural compression), arXiv:2006.09952; its α is 1/T.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([1.0, 1.5], requires_grad=True)
        >>> with gp.gradient_override({"round": gp.get_rule("soft_round", temperature=0.25)}):
        ...     torch.round(x).sum().backward()
        >>> x.grad
        tensor([0.1466, 2.0746])
    """
    warmth = _as_tensor("soft_round", temperature, grad)
    distance, rise = _from_step(inputs, call)
    height = rise / (2 * warmth * torch.tanh(1 / (2 * warmth)))
    return to_first(grad * (height * (1 - torch.tanh(distance / warmth).square())), inputs)


@rule("sigmoid_sum")
def sigmoid_sum(
    grad: Tensor,
    inputs: Inputs,
    output: Tensor,
    *,
    temperature: Number = 0.1,
    reach: int = 4,
    call: Call | None = None,
) -> Any:
    """Use the gradient of a sum of logistic functions, one at each step of the rounding.

    ====================== ==================================================================
    forward                backward
    ====================== ==================================================================
    ``y = round(x)``       ``grad_x = Σₖ σ(dₖ/T) σ(−dₖ/T) / T · grad_y``, where dₖ is the distance
    (floor, ceil, trunc)   of x to step k and T the temperature
    ====================== ==================================================================

    The sum is over the ``reach`` steps to either side of the nearest one; the other terms are smaller than
    ``exp(−reach/T)/T``. The steps are those of ``soft_round``, and for ``trunc`` also 0.

    Args:
        grad: Gradient at the output.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        temperature: T, above 0; may be a schedule.
        reach: The number of steps to either side.
        call: The call, which determines the positions of the steps.

    Source: Yang et al. 2019 (quantization networks), arXiv:1911.09464, with a step of 1.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([1.0, 1.5], requires_grad=True)
        >>> with gp.gradient_override({"round": gp.get_rule("sigmoid_sum", temperature=0.25)}):
        ...     torch.round(x).sum().backward()
        >>> x.grad
        tensor([0.8601, 1.1440])
    """
    warmth = _as_tensor("sigmoid_sum", temperature, grad)
    distance, rise = _from_step(inputs, call)
    total = torch.zeros_like(distance)
    for step in range(-reach, reach + 1):
        scaled = (distance + step) / warmth
        total = total + torch.sigmoid(scaled) * torch.sigmoid(-scaled)
    return to_first(grad * (rise * total / warmth), inputs)


@rule("soft_sort")
def soft_sort(
    grad: Tensor, inputs: Inputs, output: Any, *, temperature: Number = 1.0, call: Call | None = None
) -> Any:
    """Use the gradient of soft sorting, in which each position is a weighted mean of all entries.

    ====================== ==================================================================
    forward                backward
    ====================== ==================================================================
    ``y = sort(x)``        the gradient of ``softmax(−|y 1ᵀ − 1 xᵀ| / T) x``, where the softmax is
    (topk, msort)          taken over the entries of x
    ====================== ==================================================================

    So entries that are not selected also get a gradient, a larger one the closer they are to selected ones.
    For ``topk`` the rows of the softmax are those of the positions that it returns.

    Args:
        grad: Gradient at the sorted values.
        inputs: The operation's inputs; the first that can have a gradient gets it.
        output: The operation's output.
        temperature: T, above 0; may be a schedule. As it falls to 0, the gradient approaches that of sorting.
        call: The call, which determines the dimension and the order of sorting.

    Source: Prillo, Eisenschlos 2020 (SoftSort), arXiv:2006.16038.

    Example:
        >>> import gradpolicy as gp
        >>> x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
        >>> with gp.gradient_override({"topk": "soft_sort"}):
        ...     torch.topk(x, 1).values.sum().backward()
        >>> x.grad
        tensor([ 0.9478, -0.0518,  0.1040])
    """
    warmth = _as_tensor("soft_sort", temperature, grad)
    arguments = {} if call is None else call.arguments
    dimension = 0 if call is not None and call.operation == "msort" else int(arguments.get("dim", -1))
    descending = bool(arguments.get("largest", arguments.get("descending", False)))

    def soft(x: Tensor) -> Tensor:
        entries = x.movedim(dimension, -1)
        places = entries.sort(-1, descending=descending).values[..., : grad.shape[dimension]]
        distance = (places.unsqueeze(-1) - entries.unsqueeze(-2)).abs()
        shares = torch.softmax(-distance / warmth, -1)
        return (shares * entries.unsqueeze(-2)).sum(-1).movedim(-1, dimension)

    first = first_input(inputs)
    if not first.dim():
        return to_first(grad, inputs)
    _, pull_back = torch.func.vjp(soft, first)  # type: ignore[misc]
    return to_first(pull_back(grad)[0], inputs)


def _from_step(inputs: Inputs, call: Call | None) -> tuple[Tensor, Any]:
    """Return the distance to the nearest step in units of their width, and the mean slope."""
    if call is None or call.operation not in ROUNDING:
        call = Call("round")
    distance = steps_per_unit(call) * from_nearest_step(inputs, call)
    return distance, steps_per_unit(call) if call.operation == "floor_divide" else 1


def _as_tensor(rule_name: str, temperature: Number, like: Tensor) -> Tensor:
    check_above_zero(rule_name, "temperature", temperature)
    return on_device_of(torch.as_tensor(temperature, dtype=like.dtype), like)
