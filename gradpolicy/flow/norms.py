"""The gradient's norm before and after a policy, measured where the gradient flows."""

from collections.abc import Iterable

import torch
from torch import Tensor


class NormMeter:
    """Adds up squared norms while it is on; tensors stay on their device until somebody reads them."""

    def __init__(self) -> None:
        self.on = False
        self.clear()

    def clear(self) -> None:
        """Forgets what was measured."""
        self._before: Tensor | None = None
        self._after: Tensor | None = None

    def measure(self, before: Tensor | tuple[Tensor, ...], after: Iterable[Tensor | None]) -> None:
        """Counts one gradient on its way; under ``torch.compile`` nothing is measured."""
        if not self.on or torch.compiler.is_compiling():
            return
        incoming = before if isinstance(before, tuple) else (before,)
        with torch.no_grad():
            self._before = _add_squares(self._before, incoming)
            self._after = _add_squares(self._after, after)

    def read(self) -> tuple[Tensor, Tensor] | None:
        """The norms over everything measured since the last clearing; None where nothing was."""
        if self._before is None or self._after is None:
            return None
        return self._before.sqrt(), self._after.sqrt()


def _add_squares(total: Tensor | None, tensors: Iterable[Tensor | None]) -> Tensor | None:
    for tensor in tensors:
        if tensor is not None:
            square = (
                torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) ** 2
            )
            total = square if total is None else total + square
    return total
