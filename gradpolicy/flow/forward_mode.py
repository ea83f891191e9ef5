"""Forward-mode derivatives (``torch.func.jvp``, ``jacfwd``): a rule has none, so they are refused.

A rule says what becomes of a gradient that flows back. It need not be linear in that gradient, and then no
derivative along a direction belongs to it.
"""

from typing import Any, NoReturn

from torch.autograd import forward_ad

from gradpolicy.errors import PolicyError


def forward_mode_at_work() -> bool:
    """Whether tensors may carry a forward-mode derivative now."""
    return forward_ad._current_level >= 0


class RefusesForwardMode:
    """For an autograd Function of a rule: refuses to pass a forward-mode derivative on."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Is called where a tensor carries one."""
        rule = ctx.backward_rule
        raise PolicyError(
            f"rule {rule.rule.name!r} at {rule.place} has no forward-mode derivative: it says what becomes "
            "of a gradient that flows back. Use reverse mode: torch.func.jacrev for jacfwd, "
            "jacrev(jacrev(f)) for hessian(f), torch.autograd.grad for jvp; or switch the policy off"
        )
