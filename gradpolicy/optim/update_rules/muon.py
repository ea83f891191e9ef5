"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

Newton-Schulz makes the momentum of the active rows or columns orthogonal; the rate follows their shape.
"""

from __future__ import annotations

from torch import Tensor

from gradpolicy.optim.update_rules.base import SubmatrixRule


class Muon(SubmatrixRule):
    """`torch.optim.Muon`."""

    dims = (0, 1)

    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the momentum."""
        return ("momentum_buffer",)
