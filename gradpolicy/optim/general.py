"""Freezing under any optimizer: let it step, then put the frozen entries and their state back.

The buffers that this takes are kept from step to step, and hold no more than the masks need.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from gradpolicy.optim.cohorts import chunk
from gradpolicy.optim.layout import Layout


def begin_momenta(optimizer: torch.optim.SGD, scale: float) -> None:
    """Give parameters that join torch's fused SGD later than others the momentum they would begin with.

    The fused step needs the momentum buffers of a group to exist all or not at all. The buffer made here has
    ``μ · buffer + (1 − τ) · g = g``, as after a first step (``μ`` momentum, ``τ`` dampening).

    Args:
        optimizer: the optimizer, about to step.
        scale: what the gradients are multiplied by.
    """
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        new = [p for p in moving if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if not (group["fused"] and group["momentum"]) or len(new) in (0, len(moving)):
            continue
        for parameter in new:
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if group["dampening"]:
                sign = -1.0 if group["maximize"] else 1.0
                buffer.add_(parameter.grad, alpha=sign / scale).add_(parameter, alpha=group["weight_decay"])
                buffer.mul_(group["dampening"] / group["momentum"])
            optimizer.state[parameter]["momentum_buffer"] = buffer


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is impossible without a closure; such optimizers move tensors that have no gradient.

    LBFGS is one: it goes where the gradients of former steps lead, too.
    """
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Keeper:
    """Copies of frozen entries: of the whole tensor for entry masks, of the frozen rows for row masks."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.copies: dict[str, Tensor] = {}
        self.saved: set[str] = set()
        self.rows: Tensor | None = None
        self.active: Tensor | None = None

    def take_mask(self, active: Tensor, block: int) -> None:
        """Use these flags, one for each `block` entries, from now on."""
        self.active, self.block = active, block
        self.rows = (~active).nonzero().view(-1) if block > 1 else None
        wanted = self.layout.size if self.rows is None else self.rows.numel() * block
        self.copies = {key: copy for key, copy in self.copies.items() if copy.numel() == wanted}

    def save(self, key: str, tensor: Tensor) -> None:
        """Remember a tensor's frozen entries."""
        self.saved.add(key)
        flat = self.layout.flat(tensor)
        copy = self.copies.get(key)
        if copy is None or copy.dtype != flat.dtype:
            wanted = flat.numel() if self.rows is None else self.rows.numel() * self.block
            copy = self.copies[key] = torch.empty(wanted, dtype=flat.dtype, device=flat.device)
        if self.rows is None:
            copy.copy_(flat)
        else:
            torch.index_select(flat.view(-1, self.block), 0, self.rows, out=copy.view(-1, self.block))

    def restore(self, key: str, tensor: Tensor) -> None:
        """Put the frozen entries back, bit for bit."""
        assert self.active is not None
        flat, copy = self.layout.flat(tensor), self.copies[key]
        if self.rows is None:
            count = chunk(flat.device)
            for start in range(0, flat.numel(), count):
                part = slice(start, start + count)
                torch.where(self.active[part], flat[part], copy[part], out=flat[part])
        else:
            flat.view(-1, self.block).index_copy_(0, self.rows, copy.view(-1, self.block))
        self.layout.write_back(flat, tensor)
