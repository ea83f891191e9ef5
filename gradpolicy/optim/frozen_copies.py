"""Copies of frozen entries, from which they are put back after a step that may change them.

The buffers are kept from step to step, and hold no more than the masks need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.kernels import select
from gradpolicy.optim.layout import Layout


class FrozenCopies:
    """Copies of frozen entries: of the whole tensor for entry masks, of the frozen rows for row masks.

    Args:
        layout: of the parameter.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._copies: dict[str, Tensor] = {}
        self._saved: set[str] = set()
        self._rows: Tensor | None = None

    def take_mask(self, ages: Tensor, block: int) -> None:
        """Copies what these signed ages call frozen from now on."""
        self._ages, self._block = ages, block
        self._rows = (ages < 0).nonzero().view(-1) if block > 1 else None
        self._copies = {key: copy for key, copy in self._copies.items() if copy.numel() == self._wanted}

    @property
    def _wanted(self) -> int:
        return self._layout.size if self._rows is None else self._rows.numel() * self._block

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Remembers the frozen entries of tensors of the parameter's shape, and no others from now on."""
        self._saved = set(tensors)
        for key, tensor in tensors.items():
            flat = self._layout.flat(tensor)
            copy = self._copies.get(key)
            if copy is None or copy.dtype != flat.dtype:
                copy = self._copies[key] = torch.empty(self._wanted, dtype=flat.dtype, device=flat.device)
            if self._rows is None:
                copy.copy_(flat)
            else:
                torch.index_select(flat.view(-1, self._block), 0, self._rows, out=copy.view(-1, self._block))

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts the frozen entries back, bit for bit.

        Returns:
            The tensors of which none had been saved.
        """
        for key in tensors.keys() & self._saved:
            flat, copy = self._layout.flat(tensors[key]), self._copies[key]
            if self._rows is None:
                select(flat.device, flat.dtype).fill_frozen(flat, self._ages, None, 1, copy)
            else:
                flat.view(-1, self._block).index_copy_(0, self._rows, copy.view(-1, self._block))
            self._layout.write_back(flat, tensors[key])
        return {key: tensor for key, tensor in tensors.items() if key not in self._saved}
