"""Which parameters a step updates in which way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from gradpolicy.optim.entry_updates import Member
from gradpolicy.optim.masked_parameter import MaskedParameter, Mode
from gradpolicy.optim.update_rules import Group


class StepModes:
    """Sorts parameters by their mode, in one pass over the param groups.

    Attributes:
        by_rule: for each param group the parameters that the update rule moves, with their gradients.
        by_optimizer: what the wrapped optimizer updates.
        elsewhere: what other processes alone update.
        leaves_any: whether the wrapped optimizer has any gradient to step by.
    """

    def __init__(self) -> None:
        self.by_rule: list[tuple[Group, list[Member]]] = []
        self.by_optimizer: list[MaskedParameter] = []
        self.elsewhere: list[MaskedParameter] = []
        self.leaves_any = False
        self._hidden: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(
        cls,
        groups: list[Group],
        masked_of: dict[Tensor, MaskedParameter],
        closure: bool,
        refuse_sparse: Callable[[Tensor], NoReturn],
    ) -> StepModes:
        """Sorts the parameters of an optimizer.

        Args:
            groups: the param groups.
            masked_of: what is known of masked parameters.
            closure: whether the wrapped optimizer will make the gradients itself.
            refuse_sparse: raises the error for a sparse gradient of a parameter.
        """
        modes = cls()
        present = 0
        for group in groups:
            own: list[Member] = []
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    present += 1
                    if gradient.layout is not torch.strided:
                        refuse_sparse(parameter)
                masked = masked_of.get(parameter)
                if masked is not None:
                    modes._sort(masked, gradient, closure, own)
            if own:
                modes.by_rule.append((group, own))
        modes.leaves_any = present > len(modes._hidden)
        return modes

    def _sort(
        self, masked: MaskedParameter, gradient: Tensor | None, closure: bool, own: list[Member]
    ) -> None:
        mode = masked.mode
        if mode in (Mode.PLAIN, Mode.RESTORED):
            if gradient is not None or closure:
                self.by_optimizer.append(masked)
        elif gradient is not None:
            self._hidden.append((masked.parameter, gradient))
            if mode is Mode.MASKED:
                own.append((masked, gradient))
            elif mode is Mode.ELSEWHERE:
                self.elsewhere.append(masked)

    @contextmanager
    def hidden_gradients(self) -> Iterator[None]:
        """Hides gradients that the wrapped optimizer must not apply."""
        try:
            for parameter, _ in self._hidden:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
