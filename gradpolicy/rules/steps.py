"""The positions of the steps of rounding operations."""

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Call, Inputs
from gradpolicy.rules.routing import first_input

# Casts to integers, which round towards 0.
_CASTS = ("byte", "char", "int", "long", "short")


def from_nearest_step(inputs: Inputs, call: Call | None) -> Tensor:
    """Return the signed distance of the first input from the nearest step of the operation.

    The steps of ``round`` are half-way between integers, those of ``floor`` and ``ceil`` at integers, those
    of ``trunc`` and casts to integers at all integers but 0, those of ``x // n`` at multiples of n. The step
    of any other operation (``sign``, ``heaviside`` …) is at 0, so its input is returned unchanged.

    Raises:
        PolicyError: For ``n // x``, whose steps are not equidistant.
    """
    x = first_input(inputs)
    operation = "" if call is None else call.operation
    arguments = {} if call is None else call.arguments
    if operation == "round":
        # round(x, decimals=2) has a hundred times as many steps.
        scale = 10.0 ** (arguments.get("decimals") or 0)
        return x - (torch.floor(x * scale) + 0.5) / scale
    if operation in ("floor", "ceil"):
        return x - torch.round(x)
    if operation == "floor_divide":
        if not isinstance(arguments["input"], Tensor):
            raise PolicyError(
                "the steps of n // x are not equidistant in x; write torch.floor(n / x) instead"
            )
        return x - torch.round(x / arguments["other"]) * arguments["other"]
    if operation == "trunc" or operation in _CASTS:
        nearest = torch.round(x)
        return x - torch.where(nearest == 0, torch.where(x < 0, -1.0, 1.0).to(x.dtype), nearest)
    return x
