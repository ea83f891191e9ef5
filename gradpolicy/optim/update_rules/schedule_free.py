"""Schedule-free AdamW and SGD (Defazio et al. 2024, arXiv:2405.15682), as `schedulefree` has them.

For an entry at its t-th update, with rate a = lr min(t / warmup, 1) and its largest value so far A:

    w = t^r A^power     W = W + w     c = w / W
    d = g / (sqrt(v / (1 - b2^t)) + eps) + decay y,  for SGD  g + decay y
    y = y + c (z - y) + a (b1 (1 - c) - 1) d          z = z - a d

The parameter is y while training and x in evaluation, with  y = b1 x + (1 - b1) z. The optimizer counts t, A
and W once for a param group; here they are the entry's own, A and W as its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule


class ScheduleFreeSGD(UpdateRule):
    """`schedulefree.SGDScheduleFree`."""

    names: tuple[str, ...] = ("z", "weight_sum", "lr_max")
    counts_in_group, counts_in_tensor = True, False

    def supports(self, group: Group) -> bool:
        """Return False for half precision, in which a sum of weights would stop growing."""
        return all(parameter.dtype.itemsize >= 4 for parameter in group["params"])

    def state(self, group: Group) -> dict[str, float]:
        """Return z, which is set at the first update, W and A."""
        return dict.fromkeys(self.names, 0.0)

    def group_state(self, group: Group) -> dict[str, float]:
        """Return W and A."""
        return {"weight_sum": float(group["weight_sum"]), "lr_max": max(float(group["lr_max"]), 0.0)}

    def dense_state(self, state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Set z of entries that have had no update to their value."""
        z = torch.where(state["weight_sum"] > 0, state["z"], parameter) if "weight_sum" in state else None
        return state if z is None else {**state, "z": z}

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """Return the group's count, where the tensor has been updated."""
        return int(group["k"]) if "z" in state else 0

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        momentum = group["momentum"] if "momentum" in group else group["betas"][0]
        own = (momentum, group["lr"], group["weight_decay"], group["weight_lr_power"])
        return (1.0, *map(float, own))

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return the length of the warm-up, and r."""
        return (float(group["warmup_steps"]), float(group["r"]))

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return the warm-up's factor of the rate, and t^r."""
        warmup, power = age_settings
        return (ages / max(warmup, 1.0)).clamp(max=1.0), ages**power

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        direction = settings[0] * gradient + settings[3] * parameter
        return self._moved(parameter, direction, state, settings[1:], numbers)

    def _moved(
        self, parameter: Tensor, direction: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """Return y, and z, W and A, after an update in a direction."""
        momentum, lr, _, power = settings[:4]
        warmed, factor = numbers
        rate, before = lr * warmed, state["weight_sum"]
        z = torch.where(before > 0, state["z"], parameter)
        largest = torch.maximum(state["lr_max"], rate)
        weight = factor * largest**power
        total = before + weight
        share = torch.where(total > 0, weight / total, 0.0)
        moved = parameter + share * (z - parameter) + rate * (momentum * (1 - share) - 1) * direction
        return moved, {"z": z - rate * direction, "weight_sum": total, "lr_max": largest}


class ScheduleFreeAdamW(ScheduleFreeSGD):
    """`schedulefree.AdamWScheduleFree`."""

    names = ("z", "weight_sum", "lr_max", "exp_avg_sq")

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        return (*super().settings(group), float(group["betas"][1]), float(group["eps"]))

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return b2."""
        return (float(group["betas"][1]),)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, _, _, decay, _, beta2, eps = settings
        gradient = sign * gradient
        second = state["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
        direction = gradient / ((second / numbers[0]).sqrt() + eps) + decay * parameter
        moved, new = self._moved(parameter, direction, state, settings[1:], numbers[1:])
        return moved, {**new, "exp_avg_sq": second}
