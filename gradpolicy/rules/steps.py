"""Where the steps of rounding operations lie."""

import torch
from torch import Tensor

from gradpolicy.rules.call import Call
from gradpolicy.rules.routing import first_input

# The operations that step at every integer, or half-way between two. The others step at 0 alone.
ROUNDING = ("round", "floor", "ceil", "trunc")


def from_nearest_step(inputs: tuple[Tensor, ...], call: Call | None) -> Tensor:
    """The first input, counted from the nearest step of the operation.

    ``round`` steps half-way between integers, ``floor`` and ``ceil`` at integers, ``trunc`` at all of them
    but 0, ``x // n`` at multiples of n. The step of any other operation (``sign``, ``heaviside`` …) is at 0,
    so its input is given as it is.
    """
    x = first_input(inputs)
    operation = "" if call is None else call.operation
    arguments = {} if call is None else call.arguments
    if operation == "round":
        # round(x, decimals=2) steps a hundred times as often.
        scale = 10.0 ** (arguments.get("decimals") or 0)
        return x - (torch.floor(x * scale) + 0.5) / scale
    if operation in ("floor", "ceil"):
        return x - torch.round(x)
    if operation == "floor_divide":
        return x - torch.round(x / arguments["other"]) * arguments["other"]
    if operation == "trunc":
        nearest = torch.round(x)
        return x - torch.where(nearest == 0, torch.where(x < 0, -1.0, 1.0).to(x.dtype), nearest)
    return x
