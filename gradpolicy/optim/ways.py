"""How each masked tensor is updated in a step: by the wrapped optimizer, by the exact arithmetic, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.optim.tracked import Tracked

Group = dict[str, Any]
Exact = tuple[Group, list[tuple[Tracked, Tensor]]]
"""A param group, and those of it that the exact update is for, with their gradients."""


class Ways:
    """Sorts tensors, in one pass over the param groups.

    Args:
        groups: the param groups.
        tracked_of: what is known of masked parameters.
        closure: whether the wrapped optimizer will make the gradients itself.
        refuse: raises the error for a sparse gradient.

    Attributes:
        exact: for the exact update.
        stepped: for the wrapped optimizer, which sees them as they are.
        elsewhere: updated by other processes alone.
        leaves_any: whether the wrapped optimizer has any gradient to step by.
    """

    def __init__(
        self,
        groups: list[Group],
        tracked_of: dict[Tensor, Tracked],
        closure: bool,
        refuse: Callable[[Tensor], NoReturn],
    ) -> None:
        self.exact: list[Exact] = []
        self.stepped: list[Tracked] = []
        self.elsewhere: list[Tracked] = []
        self._hidden: list[tuple[Tensor, Tensor]] = []
        present = 0
        for group in groups:
            own: list[tuple[Tracked, Tensor]] = []
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    present += 1
                    if gradient.layout is not torch.strided:
                        refuse(parameter)
                tracked = tracked_of.get(parameter)
                if tracked is not None:
                    self._sort(tracked, gradient, closure, own)
            self.exact.append((group, own))
        self.leaves_any = present > len(self._hidden)

    def _sort(
        self, tracked: Tracked, gradient: Tensor | None, closure: bool, own: list[tuple[Tracked, Tensor]]
    ) -> None:
        waits = tracked.waits
        if gradient is None:
            if closure and not waits:
                self.stepped.append(tracked)
        elif waits or tracked.steps_exactly:
            self._hidden.append((tracked.parameter, gradient))
            if not waits:
                own.append((tracked, gradient))
            elif not tracked.rests:
                self.elsewhere.append(tracked)
        else:
            self.stepped.append(tracked)

    @contextmanager
    def hidden_gradients(self) -> Iterator[None]:
        """Keep the wrapped optimizer's hands off what is not for it."""
        try:
            for parameter, _ in self._hidden:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
