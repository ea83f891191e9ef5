"""RAdam (Liu et al. 2020, arXiv:1908.03265): Adam whose first updates do not adapt.

r = 2 / (1 - b2) - 1,  r_t = r - 2 t b2^t / (1 - b2^t)
p = p - lr m / (1 - b1^t) * l_t / (sqrt(v) + eps)  where r_t > 5, else without the last factor
l_t = sqrt((1 - b2^t) (r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t))
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.update_rules.adam import Adam
from gradpolicy.optim.update_rules.base import Group, Numbers, Settings, State


class RAdam(Adam):
    """`torch.optim.RAdam`."""

    names = ("exp_avg", "exp_avg_sq")

    def bases(self, group: Group) -> tuple[float, ...]:
        """Return nothing: all follows from the age."""
        return ()

    def age_settings(self, group: Group) -> tuple[float, ...]:
        """Return the betas."""
        return tuple(map(float, group["betas"]))

    def numbers(self, ages: Tensor, *age_settings: float) -> Numbers:
        """Return 1 / (1 - b1^t), l_t (0 before updates adapt), and 1 before updates adapt, else 0."""
        beta1, beta2 = age_settings
        correction2 = 1 - beta2**ages
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * ages * beta2**ages / correction2
        adapts = length > 5
        # The value under the root may be negative before updates adapt; the result is discarded then.
        ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        adapted = torch.where(adapts, (correction2 * ratio).clamp(min=0).sqrt(), 0.0)
        return 1 / (1 - beta1**ages), adapted, (~adapts).double()

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        sign, decay, shrink, rest1, beta2, rest2, lr, eps, _ = settings
        correction1, adapted, plain = numbers
        first, second = state["exp_avg"], state["exp_avg_sq"]
        gradient = sign * gradient + decay * parameter
        first = first + (gradient - first) * rest1
        second = second * beta2 + gradient * gradient * rest2
        factor = adapted / (second.sqrt() + eps) + plain
        parameter = parameter * shrink - lr * correction1 * first * factor
        return parameter, {"exp_avg": first, "exp_avg_sq": second}
