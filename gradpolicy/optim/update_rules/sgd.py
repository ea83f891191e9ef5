"""SGD with momentum, dampening and Nesterov's look ahead (Sutskever et al. 2013).

b = g at an entry's first update, later  mu b + (1 - tau) g          p = p - lr d
d = b, with Nesterov  g + mu b, without momentum  g
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class SGD(UpdateRule):
    """`torch.optim.SGD`."""

    names = ("momentum_buffer",)
    counts_in_tensor = False

    def state(self, group: Group) -> dict[str, float]:
        """Return the momentum, if it is used."""
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """Return 1 if there is a momentum: a higher count makes no difference."""
        return int(state.get("momentum_buffer") is not None)

    def begins_alone(self, state: dict[str, Any], group: Group) -> bool:
        """Return True for a fused step, which needs the momenta of a group to exist all or not at all."""
        fused = bool(group["fused"] and group["momentum"])
        return fused and state.get("momentum_buffer") is None

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        ahead = (1.0, momentum) if nesterov else (0.0, 1.0) if momentum else (1.0, 0.0)
        return (sign_of(group), float(group["weight_decay"]), momentum, *ahead, float(group["lr"]))

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return the dampening."""
        return (float(group["dampening"]),)

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return the factor of the gradient in the momentum: 1 at first, then 1 - tau."""
        return (1 - age_settings[0] * (ages > 1).double(),)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, momentum, of_gradient, of_momentum, lr = settings
        gradient = sign * gradient + decay * parameter
        if not state:
            return parameter - lr * gradient, {}
        buffer = momentum * state["momentum_buffer"] + numbers[0] * gradient
        direction = of_gradient * gradient + of_momentum * buffer
        return parameter - lr * direction, {"momentum_buffer": buffer}
