"""Adagrad (Duchi et al. 2011).

s = s + g^2          p = p - lr / (1 + (t - 1) decay) * g / (sqrt(s) + eps)
"""

from __future__ import annotations

from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class Adagrad(UpdateRule):
    """`torch.optim.Adagrad`."""

    names = ("sum",)

    def state(self, group: Group) -> dict[str, float]:
        """Return the sum of squares, with the constructor's initial value: torch ignores a param group's."""
        return {"sum": float(self.optimizer.defaults["initial_accumulator_value"])}

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        return (sign_of(group), float(group["weight_decay"]), float(group["lr"]), float(group["eps"]))

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return the decay of the learning rate."""
        return (float(group["lr_decay"]),)

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return 1 / (1 + (t - 1) decay)."""
        return (1 / (1 + (ages - 1) * age_settings[0]),)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, lr, eps = settings
        gradient = sign * gradient + decay * parameter
        total = state["sum"] + gradient * gradient
        return parameter - lr * numbers[0] * (gradient / (total.sqrt() + eps)), {"sum": total}
