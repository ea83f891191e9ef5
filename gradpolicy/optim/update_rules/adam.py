"""Adam and its kin: AdamW, AMSGrad, Adamax, NAdam and RAdam.

For an entry at its t-th update (Kingma & Ba 2015, arXiv:1412.6980):

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2

| optimizer | step |
|---|---|
| Adam    | p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps) |
| AMSGrad | the same with the largest v so far (Reddi et al. 2018, arXiv:1904.09237) |
| Adamax  | p = p - lr / (1 - b1^t) * m / u,  u = max(b2 u, abs(g) + eps)  (section 7.1) |
| NAdam   | p = p - lr (c_g g + c_m m) / (sqrt(v / (1 - b2^t)) + eps)  (Dozat 2016) |
| RAdam   | p = p - lr m / (1 - b1^t) * l_t / (sqrt(v) + eps)  (Liu et al. 2020, arXiv:1908.03265) |
"""

from __future__ import annotations

import functools

import numpy as np
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

    def moments(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient with weight decay that is not decoupled, and both moments after it."""
        sign, decay, _, rest1, beta2, rest2 = settings[:6]
        gradient = sign * gradient + decay * parameter
        first = state["exp_avg"] + (gradient - state["exp_avg"]) * rest1
        return gradient, first, state["exp_avg_sq"] * beta2 + gradient * gradient * rest2

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, settings: Settings, numbers: Numbers
    ) -> tuple[Tensor, State]:
        """See `UpdateRule.update`."""
        _, _, shrink, _, _, _, lr, eps, _ = settings
        collected1, collected2 = numbers
        gradient, first, second = self.moments(parameter, gradient, state, settings)
        new, largest = {"exp_avg": first, "exp_avg_sq": second}, second
        if "max_exp_avg_sq" in state:
            new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], second)
        # One root and one quotient, which take longer than the rest.
        step = collected2 * first / (collected1 * ((collected2 * largest).sqrt() + eps * collected2))
        return parameter * shrink - lr * step, new


class Adamax(Adam):
    """`torch.optim.Adamax`: Adam by the infinity norm of gradients."""

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


class NAdam(Adam):
    """`torch.optim.NAdam`: Adam with Nesterov momentum.

    With mu_t = b1 (1 - 0.96^(t psi) / 2) the factors are c_g = (1 - mu_t) / (1 - mu_1 ... mu_t) and
    c_m = mu_(t+1) / (1 - mu_1 ... mu_(t+1)).
    """

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
        _, _, shrink, _, _, _, lr, eps, _ = settings
        collected2, of_gradient, of_moment = numbers
        gradient, first, second = self.moments(parameter, gradient, state, settings)
        average = collected2 * (of_gradient * gradient + of_moment * first)
        direction = average / ((collected2 * second).sqrt() + eps * collected2)
        return parameter * shrink - lr * direction, {"exp_avg": first, "exp_avg_sq": second}


@functools.lru_cache(maxsize=16)
def _products(length: int, beta1: float, decay: float, default_dtype: torch.dtype) -> Tensor:
    """Return mu_1, mu_1 mu_2, ... (float64), rounded at each step as torch rounds its own product."""
    factors = _mu(torch.arange(1, length + 1, dtype=torch.float64, device="cpu"), beta1, decay).numpy()
    exact = default_dtype == torch.float64
    return torch.from_numpy(np.multiply.accumulate(factors if exact else factors.astype(np.float32))).double()


def _mu(ages: Tensor, beta1: float, decay: float) -> Tensor:
    return beta1 * (1 - 0.5 * 0.96 ** (ages * decay))


class RAdam(Adam):
    """`torch.optim.RAdam`: Adam whose first updates do not adapt.

    With r = 2 / (1 - b2) - 1 and r_t = r - 2 t b2^t / (1 - b2^t) updates adapt where r_t > 5, by the factor
    l_t = sqrt((1 - b2^t) (r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t)); before, m / (1 - b1^t) is the step.
    """

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
        _, _, shrink, _, _, _, lr, eps, _ = settings
        correction1, adapted, plain = numbers
        _, first, second = self.moments(parameter, gradient, state, settings)
        factor = adapted / (second.sqrt() + eps) + plain
        parameter = parameter * shrink - lr * correction1 * first * factor
        return parameter, {"exp_avg": first, "exp_avg_sq": second}
