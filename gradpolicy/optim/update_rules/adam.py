"""Adam, AdamW and AMSGrad.

For an entry at its t-th update (Kingma & Ba 2015, arXiv:1412.6980; AMSGrad: Reddi et al. 2018,
arXiv:1904.09237):

    m = b1 m + (1 - b1) g          p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    v = b2 v + (1 - b2) g^2
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State, UpdateRule, sign_of


class Adam(UpdateRule):
    """`torch.optim.Adam` and `AdamW`."""

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def state(self, group: Group) -> dict[str, float]:
        """Return first and second moment, and with AMSGrad the second moment's largest value."""
        return dict.fromkeys(self.names if group.get("amsgrad") else self.names[:2], 0.0)

    def settings(self, group: Group) -> tuple[float, ...]:
        """See `UpdateRule.settings`."""
        beta1, beta2 = map(float, group["betas"])
        decay, lr = float(group["weight_decay"]), float(group["lr"])
        # Decoupled decay scales the parameter: Loshchilov & Hutter 2019, arXiv:1711.05101.
        decays = (0.0, 1.0 - lr * decay) if group.get("decoupled_weight_decay") else (decay, 1.0)
        rates = (1 - beta1, beta2, 1 - beta2, lr, float(group["eps"]))
        return (sign_of(group), *decays, *rates, float(group.get("amsgrad", False)))

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return the betas."""
        return tuple(map(float, group["betas"]))

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, shrink, rest1, beta2, rest2, lr, eps, _ = settings
        collected1, collected2 = numbers
        root = collected2.sqrt()
        gradient = sign * gradient + decay * parameter
        first = state["exp_avg"] + (gradient - state["exp_avg"]) * rest1
        second = largest = state["exp_avg_sq"] * beta2 + gradient * gradient * rest2
        new = {"exp_avg": first, "exp_avg_sq": second}
        if "max_exp_avg_sq" in state:
            new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], second)
        step = root * first / (collected1 * (largest.sqrt() + eps * root))
        return parameter * shrink - lr * step, new
