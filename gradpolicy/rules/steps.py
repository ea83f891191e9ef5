"""The positions of the steps of rounding operations."""

from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Call, Inputs
from gradpolicy.rules.routing import first_input

# Casts to integers, which round towards 0.
_CASTS = ("byte", "char", "int", "long", "short")
# The operations that step again and again. The others step at 0 alone.
ROUNDING = ("round", "floor", "ceil", "trunc", "floor_divide", *_CASTS)


def from_nearest_step(inputs: Inputs, call: Call | None) -> Tensor:
    """Return the first input, counted from the nearest step of the operation.

    ``round`` steps half-way between integers, ``floor`` and ``ceil`` at integers, ``trunc`` and casts to
    integers at all of them but 0, ``x // n`` at multiples of n. The step of any other operation (``sign``,
    ``heaviside`` …) is at 0, so its input is given as it is.

    Raises:
        PolicyError: For ``n // x``, whose steps lie at no equal distances.
    """
    x = first_input(inputs)
    operation = "" if call is None else call.operation
    arguments = {} if call is None else call.arguments
    if operation == "round":
        scale = steps_per_unit(call)
        return x - (torch.floor(x * scale) + 0.5) / scale
    if operation in ("floor", "ceil"):
        return x - torch.round(x)
    if operation == "floor_divide":
        if not isinstance(arguments["input"], Tensor):
            raise PolicyError("the steps of n // x lie ever closer in x; write torch.floor(n / x) instead")
        return x - torch.round(x / arguments["other"]) * arguments["other"]
    if operation == "trunc" or operation in _CASTS:
        nearest = torch.round(x)
        return x - torch.where(nearest == 0, torch.where(x < 0, -1.0, 1.0).to(x.dtype), nearest)
    return x


def steps_per_unit(call: Call | None) -> Any:
    """Return how many steps a rounding operation has from integer to integer; negative for ``x // -n``."""
    if call is None:
        return 1
    if call.operation == "floor_divide":
        return 1 / call.arguments["other"]
    # round(x, decimals=2) steps a hundred times as often.
    decimals = call.arguments.get("decimals") if call.operation == "round" else None
    return 10.0**decimals if decimals else 1
