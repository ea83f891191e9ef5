"""SGD with momentum, dampening and Nesterov's look ahead (Sutskever et al. 2013).

b = g at an entry's first update, later  mu b + (1 - tau) g          p = p - lr d
d = b, with Nesterov  g + mu b, without momentum  g
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class SGD(UpdateRule):
    """`torch.optim.SGD`."""

    names = ("momentum_buffer",)

    def state(self, group: Group) -> dict[str, float]:
        """Return the momentum, if it is used."""
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    def tensor_state(self, group: Group, updates: int) -> dict[str, float]:
        """Return nothing: torch's SGD does not count."""
        return {}

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """Return 1 if there is a momentum: a higher count makes no difference."""
        return int(state.get("momentum_buffer") is not None)

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


def begin_momenta(optimizer: torch.optim.SGD, group_of: Callable[[Tensor], Group], scale: float) -> None:
    """Create momentum buffers of parameters whose first gradient comes later than that of others.

    Torch's fused step needs the momentum buffers of a group to exist all or not at all. The buffer created
    here has ``mu b + (1 - tau) g = g``, as after a first update.

    Args:
        optimizer: The optimizer, before its step.
        group_of: Returns the param group of a parameter, with its own settings in it.
        scale: The factor that the gradients are multiplied by.
    """
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        new = [p for p in moving if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if not (group["fused"] and group["momentum"]) or len(new) in (0, len(moving)):
            continue
        for parameter in new:
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if group["dampening"]:
                buffer.add_(parameter.grad, alpha=sign_of(group) / scale)
                buffer.add_(parameter, alpha=group_of(parameter)["weight_decay"])
                buffer.mul_(group["dampening"] / group["momentum"])
            optimizer.state[parameter]["momentum_buffer"] = buffer
