"""Adam and AdamW with 8-bit state (Dettmers et al. 2022, arXiv:2110.02861).

A block of consecutive entries shares a scale. Rows that consist of whole blocks do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim.update_rules.base import SubmatrixRule
from gradpolicy.tensors.row_gradient import ActiveRows


class Adam8bit(SubmatrixRule):
    """`Adam8bit` and `AdamW8bit` of torchao and bitsandbytes."""

    by_age = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.block = int(getattr(optimizer, "block_size", 256))
        self.quantised_from = int(getattr(getattr(optimizer, "args", None), "min_8bit_size", 4096))

    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return moments, and bitsandbytes' scales; torchao's are within its moments."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state1", "state2", "absmax1", "absmax2")

    def part(self, mask: Tensor, parameter: Tensor) -> ActiveRows | None:
        """Return the rows.

        Raises:
            PolicyError: If the mask is not of rows, or a block would have entries of several rows.
        """
        kind, shape = type(self.optimizer).__name__, tuple(parameter.shape)
        manager: Any = getattr(self.optimizer, "mng", None)
        of_modules = [] if manager is None else manager.module_weight_config_triple
        given = [
            *(id(getattr(module, name)) for module, name, _ in of_modules),
            *getattr(manager, "pid2config", ()),
        ]
        if id(parameter) in given:
            raise PolicyError(
                f"{kind}: bitsandbytes' GlobalOptimManager has settings for a parameter of shape {shape}, "
                "which would not reach its active rows; remove them, or freeze the whole tensor"
            )
        rows = super().part(mask, parameter)
        width = parameter[:1].numel()
        in_blocks = width % self.block == 0 or parameter.numel() < self.quantised_from
        if rows is not None and in_blocks and parameter.is_contiguous():
            return rows
        what = f"some rows of {width} entries" if rows is not None else "some entries"
        raise PolicyError(
            f"{kind} keeps one scale for a block of {self.block} entries in its state, and a mask on {what} "
            f"of a parameter of shape {shape} would cut such blocks; freeze whole tensors (level: tensor) or "
            f"rows of a multiple of {self.block} entries (level: row), or train with one whose state is not "
            "quantised, such as AdamW"
        )

    def each(self, function: Callable[..., Tensor], *values: Any) -> Any:
        """Apply a function to a tensor, or to the codes and the scales of torchao's state."""
        first = values[0]
        if not hasattr(first, "__tensor_flatten__"):
            return function(*values)
        names, context = first.__tensor_flatten__()
        own = {name: [getattr(value, name) for value in values] for name in names if name != "qmap"}
        made = {name: function(*tensors) for name, tensors in own.items()}
        return type(first).__tensor_unflatten__({**made, "qmap": first.qmap}, context, None, None)
