"""Lion (Chen et al. 2023, arXiv:2302.06675), as `pytorch_optimizer` has it.

p = p - lr sign(b1 m + (1 - b1) g)          m = b2 m + (1 - b2) g
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule


class Lion(UpdateRule):
    """`pytorch_optimizer.Lion`."""

    names = ("exp_avg",)
    counts_in_tensor = False  # but for a param group

    def supports(self, group: Group) -> bool:
        """Return False with options that depend on a full tensor."""
        return not any(group.get(option) for option in ("use_gc", "adanorm", "cautious"))

    def state(self, group: Group) -> dict[str, float]:
        """Return the momentum."""
        return {"exp_avg": 0.0}

    def updates(self, state: dict[str, Any], group: Group) -> int:
        """Return the group's count if the tensor has been updated, else 0."""
        return int(group.get("step", 0)) if state else 0

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        beta1, beta2 = map(float, group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        sign = -1.0 if getattr(self.optimizer, "maximize", False) else 1.0
        coupled, shrink = decay, 1.0
        if group["weight_decouple"]:
            coupled, shrink = 0.0, 1.0 - decay * (1.0 if group["fixed_decay"] else lr)
        return (sign, coupled, shrink, 1 - beta1, 1 - beta2, lr)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, coupled, shrink, rest1, rest2, lr = settings
        momentum = state["exp_avg"]
        gradient = sign * gradient + coupled * parameter
        direction = (momentum + (gradient - momentum) * rest1).sign()
        return parameter * shrink - lr * direction, {"exp_avg": momentum + (gradient - momentum) * rest2}
