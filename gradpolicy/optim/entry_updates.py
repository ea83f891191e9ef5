"""Updates by an update rule, for all tensors of an optimizer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradpolicy.optim.kernels import EntryUpdate, select
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.update_rules import Group, UpdateRule

Member = tuple[MaskedParameter, Tensor]
"""A parameter and its gradient."""
FIRST_LENGTH = 1024
MOST_TABLES = 64


class EntryUpdates:
    """Carries out the updates of one optimizer.

    The numbers of its rule by age are computed once, and kept while the settings that they follow from stay.

    Args:
        rule: How the optimizer moves one entry.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._tables: dict[tuple[object, ...], tuple[Tensor, bool]] = {}

    def __call__(self, groups: Sequence[tuple[Group, Sequence[Member]]], scale: float) -> None:
        """Updates parameters and counts the update.

        Args:
            groups: The parameters to update with their gradients, by param group.
            scale: The factor that the gradients were multiplied by.
        """
        steps: list[Tensor] = []
        for group, members in groups:
            sign, *rest = self._rule.settings(group)
            self._update_group(group, members, (sign / scale, *rest))
            for masked, _ in members:
                masked.count_update()
            steps += self._counts(group, members)
        if steps and all(step.is_cpu for step in steps):
            # A number would be made into a tensor for each of them anew.
            torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
        elif steps:
            torch._foreach_add_(steps, 1)
        # Autograd must see that what it may have saved is no longer there.
        updated = [masked.parameter for _, members in groups for masked, _ in members]
        if updated:
            torch.autograd.graph.increment_version(updated)

    def _update_group(self, group: Group, members: Sequence[Member], settings: tuple[float, ...]) -> None:
        """Makes one call of a kernel for all tensors of a dtype and a device."""
        together: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
        for member in members:
            parameter = member[0].parameter
            together.setdefault((parameter.dtype, parameter.device), []).append(member)
        names = tuple(self._rule.state(group))
        for (dtype, device), own in together.items():
            oldest = max([max(masked.ages.oldest, masked.updates) for masked, _ in own])
            real = dtype.to_real() if dtype.is_complex else dtype
            rows, is_constant = self._table(group, oldest, real, device)
            updates = [
                masked.entry_update(group, names, gradient, _shared_age(masked, is_constant))
                for masked, gradient in own
            ]
            # Half-precision weights may have state of full precision, which torch alone takes.
            others = [each for each in updates if not _is_of_one_type(each, real)]
            of_one_type = [each for each in updates if each not in others] if others else updates
            kernels = select(device, real, rule_kernel=self._rule.kernel)
            kernels.update(self._rule, settings, rows, of_one_type)
            if others:
                select(device, rule_kernel="").update(self._rule, settings, rows, others)
            for (masked, _), update in zip(own, updates, strict=True):
                for flat, tensor in update.unwritten:
                    masked.layout.write_back(flat, tensor)

    def _counts(self, group: Group, members: Sequence[Member]) -> list[Tensor]:
        """Return the step counts of tensors, which are still to be counted up; other counts are set."""
        names = self._rule.tensor_state(group, 0).keys()
        if names - {"step"}:
            for masked, _ in members:
                masked.state.set_count(masked.updates)
            return []
        return [masked.state.values["step"] for masked, _ in members] if names else []

    def _table(
        self, group: Group, oldest: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, bool]:
        """Return a row of numbers for each age from 0 updates on, and True if all rows are the same."""
        # Half precision is computed in float32, as by torch's fused optimizers.
        exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        settings = self._rule.age_settings(group)
        key = (settings, exact, device)
        rows, is_constant = self._tables.get(key, (None, False))
        if rows is not None and len(rows) > oldest:
            return rows, is_constant
        length = FIRST_LENGTH
        while length <= oldest:
            length *= 2
        ages = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
        columns = self._rule.numbers(ages, *settings)
        rows = torch.stack(columns, 1) if columns else ages.new_zeros(length, 0)
        is_constant = bool((rows == rows[:1]).all())
        if len(self._tables) >= MOST_TABLES:
            # A scheduler may change the betas at every step.
            self._tables.clear()
        self._tables[key] = rows.to(device=device, dtype=exact).contiguous(), is_constant
        return self._tables[key]


def _shared_age(masked: MaskedParameter, is_constant: bool) -> int | None:
    """Return the age to take for all entries; None where each has its own."""
    if is_constant:
        return 0
    return masked.updates if masked.options.bias_correction == "tensor" else None


def _is_of_one_type(update: EntryUpdate, dtype: torch.dtype) -> bool:
    """Return True if gradient and state are of the parameter's dtype."""
    return {update.gradient.dtype, *[value.dtype for value in update.state.values()]} == {dtype}
