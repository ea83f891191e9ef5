"""The numbers of an update rule by age: computed once, kept while the settings they follow from stay."""

from __future__ import annotations

import torch
from torch import Tensor

from gradpolicy.optim.update_rules import Group, UpdateRule

FIRST_LENGTH = 1024
MOST_TABLES = 64


class AgeTable:
    """A row of numbers for each age from 0 updates on.

    Attributes:
        rows: (ages, numbers), in the dtype to compute in.
        is_constant: whether all rows are the same, so that nobody has to look ages up.
    """

    def __init__(
        self,
        rule: UpdateRule,
        age_settings: tuple[float, ...],
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ages = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
        columns = rule.numbers(ages, *age_settings)
        rows = torch.stack(columns, 1) if columns else ages.new_zeros(length, 0)
        self.rows: Tensor = rows.to(device=device, dtype=dtype).contiguous()
        self.is_constant = bool((rows == rows[:1]).all())


class AgeTables:
    """The tables of one optimizer, which grow with its oldest entry."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._tables: dict[tuple[object, ...], AgeTable] = {}

    def get(self, group: Group, oldest: int, dtype: torch.dtype, device: torch.device) -> AgeTable:
        """The table for a param group.

        Args:
            group: the param group.
            oldest: the age of the oldest entry.
            dtype: what to compute in.
            device: where the entries are.
        """
        settings = self._rule.age_settings(group)
        key = (settings, dtype, device)
        table = self._tables.get(key)
        if table is None or len(table.rows) <= oldest:
            length = FIRST_LENGTH
            while length <= oldest:
                length *= 2
            if len(self._tables) >= MOST_TABLES:
                # A scheduler may change the betas at every step.
                self._tables.clear()
            table = self._tables[key] = AgeTable(self._rule, settings, length, dtype, device)
        return table


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: half precision is computed in float32, as by torch's fused optimizers."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
