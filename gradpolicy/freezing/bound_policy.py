"""A policy with a mask source, bound to the parameters of a model."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown, under
from gradpolicy.masks.base import MaskSource
from gradpolicy.policies import Freeze, Train
from gradpolicy.tensors.mask import (
    Mask,
    active_share,
    check_mask,
    intersect,
    mask_from_state,
    mask_to_state,
    same_mask,
    unite,
)
from gradpolicy.tensors.seeded import RandomMask, derive
from gradpolicy.when import When


@dataclass(eq=False)
class BoundPolicy:
    """A policy with its parameters and the current masks of its source.

    Attributes:
        name: The policy's name.
        policy: The policy; its mask source is set up on the parameters that it matches.
        parameters: The parameters that it restricts, by name: under ``Train`` also those that it freezes
            because it does not match them.
        masks: The current masks by parameter name.
        in_effect: True if the policy is active in the current step.
        period: The period of the source's timetable to which the masks belong.
        observed: The ids of the optimizers whose gradients the source got in the current step.
    """

    name: str
    policy: Freeze
    parameters: dict[str, Tensor]
    masks: dict[str, Mask] = field(default_factory=dict)
    in_effect: bool = False
    period: int | None = None
    observed: set[int] = field(default_factory=set)

    @property
    def source(self) -> MaskSource:
        """The policy's mask source."""
        return self.policy.mask

    def matches(self, name: str) -> bool:
        """Return True if the policy's ``params`` match a parameter."""
        return name in self.source.parameters

    def update(self, step: int, epoch: int, phase: str) -> set[str]:
        """Get new masks from the source if its timetable allows a change.

        Args:
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
            phase: The current phase.

        Returns:
            The names of the parameters whose mask has changed.
        """
        self.observed.clear()
        asks = self.asks(step, epoch, phase)
        before, self.in_effect = self.in_effect, self.policy.when.active(phase=phase, step=step, epoch=epoch)
        if not self.in_effect:
            return set(self.parameters) if before else set()
        if not asks:
            return set()
        period = self.source.period(step, epoch)
        with under(f"policy.{self.name}"):
            new = self._checked(self.source.masks(step, epoch))
        new = {name: self._copied(name, mask) for name, mask in new.items()}
        old, self.period, self.masks = self.masks, period, new
        kept = {name for name, mask in old.items() if before and same_mask(mask, self.masks[name])}
        return self.parameters.keys() - kept

    def asks(self, step: int, epoch: int, phase: str) -> bool:
        """Return True if :meth:`update` gets masks from the source."""
        if not self.policy.when.active(phase=phase, step=step, epoch=epoch):
            return False
        same = self.in_effect and self.source.period(step, epoch) == self.period
        return not same or self.source.overdue(step, epoch)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters whose gradients the source needs in the current step."""
        return self.source.gradient_names(step, epoch) if self.in_effect else set()

    def show(self, optimizer: int, optimized: Collection[Tensor], step: int, epoch: int) -> None:
        """Pass gradients of the current update to the source, which may get them from several optimizers.

        Args:
            optimizer: The id of the optimizer.
            optimized: Its parameters.
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
        """
        wanted = self.gradient_names(step, epoch)
        # In the order of the parameters, which is the same on all processes.
        gradients = {
            name: parameter.grad.detach()
            for name, parameter in self.parameters.items()
            if name in wanted and parameter in optimized and parameter.grad is not None
        }
        if not gradients:
            return
        if self.observed and optimizer not in self.observed:
            self.source.observe_more(gradients)
        else:
            self.observed.clear()
            self.source.observe(gradients)
        self.observed.add(optimizer)

    def frozen_tensors(self) -> set[str]:
        """Return the names of parameters without an active entry, now or at a scheduled time."""
        idle = {name for name, mask in self.masks.items() if not active_share(mask)}
        return idle | self.source.may_freeze()

    def identity(self) -> str:
        """Return a string by which saved states are compared: the source's class and the parameters."""
        return f"{type(self.source).__name__} {derive(*self.source.parameters):016x}"

    def mask_state(self) -> dict[str, Any] | None:
        """Return the period and its masks, neither if the source can repeat them; None if not in effect."""
        if not self.in_effect:
            return None
        # A run that resumes between its last update and a validation has not asked such a source yet.
        period, masks = (None, {}) if self.source.repeats_masks else (self.period, self.masks)
        return {"period": period, "masks": {name: mask_to_state(m) for name, m in masks.items()}}

    def load_mask_state(self, state: Mapping[str, Any] | None) -> None:
        """Load the result of :meth:`mask_state`; without masks the source returns them at the next step."""
        self.masks, self.period, self.in_effect = {}, None, state is not None
        if state is not None and state["masks"]:
            devices = {name: parameter.device for name, parameter in self.parameters.items()}
            masks = {name: mask_from_state(state["masks"][name], device) for name, device in devices.items()}
            self.masks, self.period = self._checked(masks), state["period"]

    def _checked(self, given: Mapping[str, Mask]) -> dict[str, Mask]:
        """Return a mask for each parameter.

        Raises:
            PolicyError: If a mask has the wrong shape, or belongs to another parameter.
        """
        for name in given:
            if name not in self.parameters:
                raise PolicyError(
                    f"a mask for {name!r}, which the policy does not match; {nearest(name, self.parameters)}"
                )
        return {
            name: _as_flag(check_mask(given.get(name, self.matches(name)), parameter, shown(name)))
            for name, parameter in self.parameters.items()
        }

    def _copied(self, name: str, mask: Mask) -> Mask:
        """Return a copy of a mask tensor, since a source may modify the tensors that it returned.

        If it equals the previous mask, that is returned, so that it counts as the same mask.
        """
        before = self.masks.get(name)
        if not isinstance(mask, Tensor):
            return mask
        if isinstance(before, Tensor) and torch.equal(before, mask):
            return before
        return mask if self.source.keeps_masks else mask.clone()


def masks_never_change(policy: Freeze) -> bool:
    """Return True if the masks never change after the first update."""
    times = policy.mask.timetable
    chosen_at_once = times.every is None and not times.start
    return chosen_at_once and not policy.mask.needs_gradients and policy.when == When()


def combine(policies: Iterable[BoundPolicy], name: str, parameter: Tensor) -> Mask:
    """Return the mask of a parameter under several active policies.

    The masks of ``Train`` policies are united, and the result is intersected with those of all others.

    Args:
        policies: The policies; those that do not restrict the parameter have no effect.
        name: The name of the parameter.
        parameter: The parameter.
    """
    shape, device = parameter.shape, parameter.device
    combined: Mask = True
    trained: Mask | None = None
    for each in policies:
        mask = each.masks.get(name, True)
        if isinstance(each.policy, Train):
            trained = mask if trained is None else unite(trained, mask, shape, device)
        else:
            combined = intersect(combined, mask, shape, device)
    return combined if trained is None else intersect(combined, trained, shape, device)


def evaluated(in_effect: Iterable[BoundPolicy], masks: Mapping[str, Mask]) -> set[str]:
    """Return the parameters that active policies with ``buffers="eval"`` freeze, by name.

    Args:
        in_effect: The active policies.
        masks: The masks of parameters under all policies together.
    """
    under_eval = [each.masks.items() for each in in_effect if each.policy.buffers == "eval"]
    idle = {name for items in under_eval for name, mask in items if mask is False}
    return {name for name in idle if masks.get(name, False) is False}


def _as_flag(mask: Mask) -> Mask:
    """Convert a mask with a single flag to a bool, with which the backward pass can be skipped."""
    if isinstance(mask, RandomMask) and mask.level == "tensor":
        return bool(mask.materialize(()))
    return bool(mask) if isinstance(mask, Tensor) and mask.numel() == 1 else mask
