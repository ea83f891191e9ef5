"""RMSprop (Hinton 2012, lecture 6e), with momentum and centered (Graves 2013, arXiv:1308.0850).

v = alpha v + (1 - alpha) g^2          d = g / (sqrt(v - a^2) + eps), a = 0 unless centered
a = alpha a + (1 - alpha) g            b = mu b + d,  p = p - lr b
"""

from __future__ import annotations

from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class RMSprop(UpdateRule):
    """`torch.optim.RMSprop`."""

    names = ("square_avg", "momentum_buffer", "grad_avg")

    def state(self, group: Group) -> dict[str, float]:
        """Return the mean square, and if they are used the momentum and the mean."""
        names = ["square_avg"]
        names += ["momentum_buffer"] if group["momentum"] > 0 else []
        names += ["grad_avg"] if group["centered"] else []
        return dict.fromkeys(names, 0.0)

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        alpha, momentum = float(group["alpha"]), max(float(group["momentum"]), 0.0)
        rest = (momentum, float(group["centered"]), float(group["lr"]), float(group["eps"]))
        return (sign_of(group), float(group["weight_decay"]), alpha, 1 - alpha, *rest)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, alpha, rest, momentum, _, lr, eps = settings
        gradient = sign * gradient + decay * parameter
        square = variance = state["square_avg"] * alpha + gradient * gradient * rest
        new = {"square_avg": square}
        if "grad_avg" in state:
            new["grad_avg"] = mean = state["grad_avg"] + (gradient - state["grad_avg"]) * rest
            variance = square - mean * mean
        direction = gradient / (variance.sqrt() + eps)
        if "momentum_buffer" in state:
            new["momentum_buffer"] = direction = state["momentum_buffer"] * momentum + direction
        return parameter - lr * direction, new
