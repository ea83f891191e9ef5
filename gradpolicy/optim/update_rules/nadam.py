"""NAdam (Dozat 2016): Adam with Nesterov momentum.

mu_t = b1 (1 - 0.96^(t psi) / 2)          p = p - lr (c_g g + c_m m) / (sqrt(v / (1 - b2^t)) + eps)
c_g = (1 - mu_t) / (1 - mu_1 ... mu_t)    c_m = mu_(t+1) / (1 - mu_1 ... mu_(t+1))
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradpolicy.optim.update_rules.adam import Adam
from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State


class NAdam(Adam):
    """`torch.optim.NAdam`."""

    names = ("exp_avg", "exp_avg_sq")

    def tensor_state(self, group: Group, updates: int) -> dict[str, float]:
        """Return the count, and mu_1 ... mu_t."""
        return {"step": float(updates), "mu_product": self._product(updates, *self.age_settings(group))}

    def _product(self, updates: int, *settings: float) -> float:
        """Return mu_1 ... mu_t, from the products up to the next power of two."""
        length = 1 << max(updates, 1).bit_length()
        return float(_products(length, *settings, torch.get_default_dtype())[updates - 1]) if updates else 1.0

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return b2."""
        return super().bases(group)[1:]

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return b1 and psi."""
        return float(group["betas"][0]), float(group["momentum_decay"])

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return c_g and c_m."""
        now, following = _mu(ages, *age_settings), _mu(ages + 1, *age_settings)
        product = _products(len(ages), *age_settings, torch.get_default_dtype())
        return (1 - now) / (1 - product), following / (1 - product * following)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, shrink, rest1, beta2, rest2, lr, eps, _ = settings
        collected2, of_gradient, of_moment = numbers
        first, second = state["exp_avg"], state["exp_avg_sq"]
        gradient = sign * gradient + decay * parameter
        first = first + (gradient - first) * rest1
        second = second * beta2 + gradient * gradient * rest2
        direction = (of_gradient * gradient + of_moment * first) / ((second / collected2).sqrt() + eps)
        return parameter * shrink - lr * direction, {"exp_avg": first, "exp_avg_sq": second}


@functools.lru_cache(maxsize=16)
def _products(length: int, beta1: float, decay: float, default_dtype: torch.dtype) -> Tensor:
    """Return mu_1, mu_1 mu_2, ... (float64), rounded at each step as torch rounds its own product."""
    factors = _mu(torch.arange(1, length + 1, dtype=torch.float64, device="cpu"), beta1, decay).numpy()
    exact = default_dtype == torch.float64
    return torch.from_numpy(np.multiply.accumulate(factors if exact else factors.astype(np.float32))).double()


def _mu(ages: Tensor, beta1: float, decay: float) -> Tensor:
    return beta1 * (1 - 0.5 * 0.96 ** (ages * decay))
