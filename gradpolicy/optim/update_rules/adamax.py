"""Adamax: Adam by the infinity norm of gradients (Kingma & Ba 2015, arXiv:1412.6980, section 7.1).

m = b1 m + (1 - b1) g          p = p - lr / (1 - b1^t) * m / u
u = max(b2 u, |g| + eps)
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.adam import Adam
from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State


class Adamax(Adam):
    """`torch.optim.Adamax`."""

    names = ("exp_avg", "exp_inf")

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return b1."""
        return super().bases(group)[:1]

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, shrink, rest1, beta2, _, lr, eps, _ = settings
        gradient = sign * gradient + decay * parameter
        first = state["exp_avg"] + (gradient - state["exp_avg"]) * rest1
        largest = torch.maximum(beta2 * state["exp_inf"], gradient.abs() + eps)
        parameter = parameter * shrink - lr * (first / (numbers[0] * largest))
        return parameter, {"exp_avg": first, "exp_inf": largest}
