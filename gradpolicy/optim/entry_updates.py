"""Updates by the rule, for all tensors of an optimizer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradpolicy.optim.age_tables import AgeTables, compute_dtype
from gradpolicy.optim.kernels import EntryUpdate, select
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.update_rules import Group, UpdateRule

Member = tuple[MaskedParameter, Tensor]
"""A parameter and its gradient."""


class EntryUpdates:
    """Carries out the updates of one optimizer, and keeps its tables of numbers.

    Args:
        rule: how the optimizer moves one entry.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._tables = AgeTables(rule)

    def __call__(self, groups: Sequence[tuple[Group, Sequence[Member]]], scale: float) -> None:
        """Updates parameters and counts the update.

        Args:
            groups: what to update, by param group.
            scale: what the gradients were multiplied by.
        """
        steps: list[Tensor] = []
        for group, members in groups:
            sign, *rest = self._rule.settings(group)
            self._update_group(group, members, (sign / scale, *rest))
            for masked, _ in members:
                masked.write_back()
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
        """One call of a kernel for all tensors of a dtype and a device."""
        together: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
        for member in members:
            parameter = member[0].parameter
            together.setdefault((parameter.dtype, parameter.device), []).append(member)
        for (dtype, device), own in together.items():
            oldest = max([max(masked.oldest, masked.updates) for masked, _ in own])
            real = dtype.to_real() if dtype.is_complex else dtype
            names = tuple(self._rule.state(group))
            table = self._tables.get(group, oldest, compute_dtype(real), device)
            updates = [
                masked.entry_update(group, names, gradient, _shared_age(masked, table.is_constant))
                for masked, gradient in own
            ]
            # Half-precision weights may have state of full precision, which torch alone takes.
            of_one_type = [each for each in updates if _is_of_one_type(each, real)]
            kernels = select(device, real, rule_kernel=self._rule.kernel)
            kernels.update(self._rule, settings, table.rows, of_one_type)
            if len(of_one_type) < len(updates):
                others = [each for each in updates if not _is_of_one_type(each, real)]
                select(device, rule_kernel="").update(self._rule, settings, table.rows, others)

    def _counts(self, group: Group, members: Sequence[Member]) -> list[Tensor]:
        """The step counts of tensors, which are still to be counted up; other counts are set."""
        names = self._rule.tensor_state(group, 0).keys()
        if names - {"step"}:
            for masked, _ in members:
                masked.set_count(masked.updates)
            return []
        return [masked.state["step"] for masked, _ in members] if names else []


def _shared_age(masked: MaskedParameter, constant: bool) -> int | None:
    """The age to take for all entries; None where each has its own."""
    if constant:
        return 0
    return masked.updates if masked.bias_correction == "tensor" else None


def _is_of_one_type(update: EntryUpdate, dtype: torch.dtype) -> bool:
    """Whether gradient and state are of the parameter's dtype."""
    return {update.gradient.dtype, *[value.dtype for value in update.state.values()]} == {dtype}
