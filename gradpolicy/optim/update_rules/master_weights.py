"""Weights of 16 bits that are updated as float32.

A float32 number is kept as the 16-bit weight nearest to it, which the model sees, and as a rest of 16 bits.
An update joins both, moves the float32 number by the optimizer's rule, and splits the result.

The rest counts the steps between neighbouring float32 numbers from the weight to the full number. For
bfloat16, rounded half away from zero, it fits 16 bits always, so that no bit is lost. For float16 it fits
down to 2^-16 (1.5e-5); smaller numbers are kept to a multiple of 2^-40 (9e-13).

The rest is two bytes instead of one 16-bit integer: inductor's loops are several times as fast on bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule

DTYPES = (torch.bfloat16, torch.float16)
HIGH, LOW = "master_rest_high", "master_rest_low"
"""The two bytes of the rest, of which 128 and 0 are a rest of 0."""
_SMALL, _UNIT = 2.0**-16, 2.0**-40
"""Below which float16 counts its rest in multiples of a unit, and that unit."""


class MasterWeights(UpdateRule):
    """The rule of an optimizer for weights of 16 bits that are updated as float32.

    Args:
        rule: How the optimizer moves an entry.
        dtype: The dtype of the weights.
    """

    of_weight = HIGH, LOW

    def __init__(self, rule: UpdateRule, dtype: torch.dtype) -> None:
        super().__init__(rule.optimizer)
        self.rule, self.dtype, self.names = rule, dtype, (*rule.names, *self.of_weight)
        self.kind = rule.kind, dtype
        for name in ("tensor_state", "updates", "bases", "age_settings", "numbers"):
            setattr(self, name, getattr(rule, name))

    def state_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return uint8 for the rest, float32 for the optimizer's own state."""
        return torch.uint8 if name in self.of_weight else torch.float32

    def state(self, group: Group) -> dict[str, float]:
        """Return the state of the optimizer, and the rest."""
        return {**self.rule.state(group), HIGH: 128.0, LOW: 0.0}

    def begins_alone(self, state: dict[str, Any], group: Group) -> bool:
        """Return True: the optimizer's own step does not know the rest."""
        return True

    def settings(self, group: Group) -> tuple[float, ...]:
        """Return those of the optimizer's rule."""
        return self.rule.settings(group)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        own = {name: value for name, value in state.items() if name not in self.of_weight}
        rest = (state[HIGH] - 128) * 256 + state[LOW]
        full, new = self.rule.update(joined(parameter, rest, self.dtype), gradient, own, settings, numbers)
        weight, left = split(full, self.dtype)
        left = left + 0x8000
        return weight, {**new, HIGH: (left >> 8).float(), LOW: (left & 0xFF).float()}


def joined(weight: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the full numbers (float32).

    Args:
        weight: The weights, as float32.
        rest: What is left, integers.
        dtype: The dtype of the weights.
    """
    # A weight that something else set to 0 may have kept any rest.
    steps = torch.where(weight == 0, rest.clamp(min=0), rest).to(torch.int32)
    full = (weight.view(torch.int32) + steps).view(torch.float32)
    return (
        full if dtype == torch.bfloat16 else torch.where(weight.abs() < _SMALL, weight + rest * _UNIT, full)
    )


def split(full: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights (float32, without loss in their dtype) and what is left (int32) of full numbers."""
    bits = full.view(torch.int32)
    if dtype == torch.bfloat16:
        rounded, is_nan = (bits + 0x8000) & -0x10000, full != full  # inductor's isnan is slow
        weight = torch.where(is_nan, full, rounded.view(torch.float32))
        return weight, torch.where(is_nan, 0, bits - rounded)
    weight = full.to(dtype).float()
    steps = (bits - weight.view(torch.int32)).float()
    rest = torch.where(weight.abs() < _SMALL, ((full - weight) / _UNIT).round(), steps).clamp(max=0x7FFF)
    return weight, torch.where(rest >= -0x8000, rest, 0.0).to(torch.int32)
