"""A freeze policy with the parameters it matches and the masks it last gave."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown, under
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.function import Adapted
from gradpolicy.tensors.hashing import derive
from gradpolicy.tensors.mask import (
    Mask,
    active_entries,
    check_mask,
    mask_from_state,
    mask_to_state,
    same_mask,
)
from gradpolicy.tensors.seeded_mask import RandomMask
from gradpolicy.when import When


class FreezePolicy(Protocol):
    """What the engine needs of a policy; :class:`gradpolicy.Freeze` has it."""

    frozen_state: str
    bias_correction: str
    when: When

    @property
    def mask(self) -> MaskSource:
        """Gives the masks."""

    @property
    def params(self) -> Sequence[str] | str:
        """Globs on parameter names."""


@dataclass
class PolicyMasks:
    """A policy with the parameters it matches and the masks that its source last gave.

    Attributes:
        name: The policy's name.
        policy: The policy.
        source: Its mask source, set up on the parameters.
        parameters: The parameters by name.
        masks: The masks that the source last gave, one for each parameter.
        in_effect: Whether the policy's ``when`` lets it act in this step.
        asked: Whether a step has begun at all.
        period: The period of the source's timetable that the masks are of.
        counted: How many entries the masks let train; None until they are counted.
        shown: The optimizers whose gradients the source has seen in this step.
        given: The tensors that the source last gave, and how often they had been written to.
    """

    name: str
    policy: FreezePolicy
    source: MaskSource
    parameters: dict[str, Tensor]
    masks: dict[str, Mask] = field(default_factory=dict)
    in_effect: bool = False
    asked: bool = False
    period: int | None = None
    counted: int | None = None
    shown: set[int] = field(default_factory=set)
    given: dict[str, tuple[Tensor, int | None]] = field(default_factory=dict)

    def update(self, step: int, epoch: int, phase: str) -> set[str]:
        """Asks the source for new masks where its timetable allows a change.

        Returns:
            The names of the parameters whose mask has changed.
        """
        self.asked = True
        self.shown.clear()
        before, self.in_effect = self.in_effect, self.policy.when.active(phase=phase, step=step, epoch=epoch)
        if not self.in_effect:
            return set(self.parameters) if before else set()
        period = self.source.period(step, epoch)
        # Within an epoch that is due, a source is asked once.
        due = self.source.timetable.unit == "step" and self.source.due(step, epoch)
        if before and period == self.period and not due and not self.source.overdue(step, epoch):
            return set()
        old, self.period, self.counted = self.masks, period, None
        self.masks = self._snapshot(self._ask(self.source, step, epoch))
        return {name for name in self.parameters if not before or not same_mask(old[name], self.masks[name])}

    @property
    def never_changes(self) -> bool:
        """Whether the first masks hold all the time."""
        return masks_never_change(self.policy, self.source)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """The parameters whose gradients the source needs in this step."""
        return self.source.gradient_names(step, epoch) if self.in_effect else set()

    def show(self, gradients: Mapping[str, Tensor], optimizer: int) -> None:
        """Shows the source gradients of this step; those of several optimizers belong to one step.

        Args:
            gradients: By parameter name.
            optimizer: Tells the optimizers apart.
        """
        if self.shown and optimizer not in self.shown:
            self.source.observe_more(gradients)
        else:
            self.shown.clear()
            self.source.observe(gradients)
        self.shown.add(optimizer)

    def identity(self) -> str:
        """Tells whether a saved state is this policy's: the kind of its source, and the parameters."""
        kind = type(self.source.source if isinstance(self.source, Adapted) else self.source).__name__
        return f"{kind} {derive(*self.parameters):016x}"

    def mask_state(self) -> dict[str, Any] | None:
        """The masks in force and their period; None where there are none, or the source can repeat them."""
        if self.source.repeats_masks or not self.in_effect:
            return None
        return {"period": self.period, "masks": {name: mask_to_state(m) for name, m in self.masks.items()}}

    def load_mask_state(self, state: Mapping[str, Any] | None) -> None:
        """Takes up what :meth:`mask_state` gave; without it, the source is asked at the next step."""
        self.period, self.in_effect, self.counted, self.given = None, False, None, {}
        if state is None:
            return
        self.masks = self._checked(
            {name: mask_from_state(state["masks"][name], p.device) for name, p in self.parameters.items()}
        )
        self.period, self.in_effect = state["period"], True

    def _ask(self, source: MaskSource, step: int, epoch: int) -> dict[str, Mask]:
        with under(f"policy.{self.name}"):
            return self._checked(source.masks(step, epoch))

    def _checked(self, given: Mapping[str, Mask]) -> dict[str, Mask]:
        for name in given:
            if name not in self.parameters:
                raise PolicyError(
                    f"a mask for {name!r}, which the policy does not match; {nearest(name, self.parameters)}"
                )
        return {
            name: _as_flag(check_mask(given.get(name, True), parameter, shown(name)))
            for name, parameter in self.parameters.items()
        }

    def _snapshot(self, masks: dict[str, Mask]) -> dict[str, Mask]:
        """Copies tensors, since a source may go on writing to those that it has given."""
        before = self.given
        self.given = {
            name: (mask, _version(mask)) for name, mask in masks.items() if isinstance(mask, Tensor)
        }
        for name, (mask, version) in self.given.items():
            earlier, then = before.get(name, (None, None))
            if earlier is mask and version is not None and version == then:
                masks[name] = self.masks[name]
            elif earlier is mask or not self.source.repeats_masks:
                masks[name] = mask.clone()
        return masks

    def _first_masks(self) -> dict[str, Mask]:
        """What the source would give in the first step; it is a copy that decides it."""
        source = copy.copy(self.source)
        if isinstance(source, Adapted):
            source.source = copy.copy(source.source)
        return self._ask(source, 0, 0)

    def frozen_tensors(self) -> set[str]:
        """Return the parameters without an active entry, now or at some time that is known beforehand."""
        masks = self.masks or self._first_masks()
        now = {name for name, p in self.parameters.items() if not active_entries(masks[name], p.shape)}
        return now | self.source.may_freeze()

    def active(self) -> int:
        """How many entries the policy lets train; counted once for each change of the masks."""
        if self.asked and not self.in_effect:
            return sum(parameter.numel() for parameter in self.parameters.values())
        if self.counted is None:
            masks = self.masks or self._first_masks()
            self.counted = sum(
                active_entries(masks[name], parameter.shape) for name, parameter in self.parameters.items()
            )
        return self.counted


def masks_never_change(policy: FreezePolicy, source: MaskSource) -> bool:
    """Return True if the masks of the first step hold all the time."""
    chosen_at_once = source.timetable.every is None and not source.timetable.start
    return chosen_at_once and not source.needs_gradients and policy.when == When()


def _version(mask: Tensor) -> int | None:
    """How often a tensor has been written to; None where nobody counts."""
    return None if mask.is_inference() else mask._version


def _as_flag(mask: Mask) -> Mask:
    """One flag for the whole tensor as a bool, which can be compared and spares the backward pass."""
    if isinstance(mask, RandomMask) and mask.level == "tensor":
        return bool(mask.materialize(()))
    return bool(mask) if isinstance(mask, Tensor) and mask.numel() == 1 else mask
