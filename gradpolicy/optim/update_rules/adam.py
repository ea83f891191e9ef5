"""Adam (Kingma & Ba 2015, arXiv:1412.6980), with AdamW and AMSGrad.

For an entry at its t-th update:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

AMSGrad takes the largest v so far (Reddi et al. 2018, arXiv:1904.09237).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class Adam(UpdateRule):
    """`torch.optim.Adam` and `AdamW`."""

    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def state(self, group: Group) -> dict[str, float]:
        """Return first and second moment, and with AMSGrad the second moment's largest value."""
        return dict.fromkeys(self.names if group.get("amsgrad") else self.names[:2], 0.0)

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        beta1, beta2 = map(float, group["betas"])
        decay, lr = float(group["weight_decay"]), float(group["lr"])
        # Decoupled decay scales the parameter: Loshchilov & Hutter 2019, arXiv:1711.05101.
        decays = (0.0, 1.0 - lr * decay) if group.get("decoupled_weight_decay") else (decay, 1.0)
        return (sign_of(group), *decays, 1 - beta1, beta2, 1 - beta2, lr, float(group["eps"]))

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return the betas."""
        return tuple(map(float, group["betas"]))

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, shrink, rest1, beta2, rest2, lr, eps = settings
        collected1, collected2 = numbers
        gradient = sign * gradient + decay * parameter
        first = state["exp_avg"] + (gradient - state["exp_avg"]) * rest1
        second = state["exp_avg_sq"] * beta2 + gradient * gradient * rest2
        new, largest = {"exp_avg": first, "exp_avg_sq": second}, second
        if "max_exp_avg_sq" in state:
            new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], second)
        # One root and one quotient, which take longer than the rest.
        step = collected2 * first / (collected1 * ((collected2 * largest).sqrt() + eps * collected2))
        return parameter * shrink - lr * step, new
