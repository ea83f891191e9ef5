"""A freeze policy with the parameters that it matches and its current masks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown, under
from gradpolicy.masks.base import MaskSource
from gradpolicy.policies import Freeze
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


@dataclass(eq=False)
class PolicyMasks:
    """A policy with the parameters it matches and the masks that its source last gave.

    Attributes:
        name: The policy's name.
        policy: The policy.
        source: Its mask source, set up on the parameters.
        parameters: The parameters by name.
        masks: The masks that the source last gave, one for each parameter.
        in_effect: True if the policy's ``when`` lets it act in this step.
        period: The period of the source's timetable that the masks are of.
        counted: How many entries the masks let train; None until they are counted.
        shown: The optimizers whose gradients the source has seen in this step.
        given: The tensors that the source last gave, with their version counters.
    """

    name: str
    policy: Freeze
    source: MaskSource
    parameters: dict[str, Tensor]
    masks: dict[str, Mask] = field(default_factory=dict)
    in_effect: bool = False
    period: int | None = None
    counted: int | None = None
    shown: set[int] = field(default_factory=set)
    given: dict[str, tuple[Tensor, int | None]] = field(default_factory=dict)

    def update(self, step: int, epoch: int, phase: str) -> set[str]:
        """Ask the source for new masks where its timetable allows a change.

        Returns:
            The names of the parameters whose mask has changed.
        """
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
        self.masks = self._snapshot(self._ask(step, epoch))
        return {name for name in self.parameters if not before or not same_mask(old[name], self.masks[name])}

    @property
    def never_changes(self) -> bool:
        """True if the first masks hold all the time."""
        return masks_never_change(self.policy)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the parameters whose gradients the source needs in this step."""
        return self.source.gradient_names(step, epoch) if self.in_effect else set()

    def show(self, gradients: Mapping[str, Tensor], optimizer: int) -> None:
        """Give the source gradients of this step; those of several optimizers belong to one step.

        Args:
            gradients: By parameter name.
            optimizer: Identifies the optimizer.
        """
        if self.shown and optimizer not in self.shown:
            self.source.observe_more(gradients)
        else:
            self.shown.clear()
            self.source.observe(gradients)
        self.shown.add(optimizer)

    def identity(self) -> str:
        """Return what a saved state must have in common: the kind of the source, and the parameters."""
        return f"{type(self.source.original).__name__} {derive(*self.parameters):016x}"

    def mask_state(self) -> dict[str, Any] | None:
        """Return the masks in force and their period; None without any, or if the source can repeat them."""
        if self.source.repeats_masks or not self.in_effect:
            return None
        return {"period": self.period, "masks": {name: mask_to_state(m) for name, m in self.masks.items()}}

    def load_mask_state(self, state: Mapping[str, Any] | None) -> None:
        """Load what :meth:`mask_state` returned; without it, the source is asked at the next step."""
        self.period, self.in_effect, self.counted, self.given = None, False, None, {}
        if state is None:
            return
        self.masks = self._checked(
            {name: mask_from_state(state["masks"][name], p.device) for name, p in self.parameters.items()}
        )
        self.period, self.in_effect = state["period"], True

    def _ask(self, step: int, epoch: int) -> dict[str, Mask]:
        with under(f"policy.{self.name}"):
            return self._checked(self.source.masks(step, epoch))

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
        """Copy tensors, since a source may go on writing to those that it has given."""
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

    def frozen_tensors(self) -> set[str]:
        """Return the parameters without an active entry, now or at some time that is known beforehand."""
        idle = {name for name, m in self.masks.items() if not active_entries(m, self.parameters[name].shape)}
        return idle | self.source.may_freeze()

    def active_share(self) -> float:
        """Return the share of entries that the policy lets train; counted once for each change."""
        if not self.in_effect:
            return 1.0
        if self.counted is None:
            self.counted = sum(
                active_entries(m, self.parameters[name].shape) for name, m in self.masks.items()
            )
        return self.counted / max(sum(parameter.numel() for parameter in self.parameters.values()), 1)


def check_same_options(name: str, policies: Mapping[str, Freeze]) -> None:
    """Check that the policies on one parameter want the same optimizer state.

    Raises:
        PolicyError: If they do not; it names both.
    """
    (first, one), *rest = policies.items()
    for other, another in rest:
        for key in ("frozen_state", "bias_correction"):
            here, there = getattr(one, key), getattr(another, key)
            if here != there:
                raise PolicyError(
                    f"{name!r}: policy.{first} wants {key}={here!r}, policy.{other} {key}={there!r};"
                    f" policies on one parameter must agree: give both the same {key}, or different params"
                )


def masks_never_change(policy: Freeze) -> bool:
    """Return True if the masks of the first step hold all the time."""
    times = policy.mask.timetable
    chosen_at_once = times.every is None and not times.start
    return chosen_at_once and not policy.mask.needs_gradients and policy.when == When()


def _version(mask: Tensor) -> int | None:
    """Return how often a tensor was written to; None in inference mode, which does not count."""
    return None if mask.is_inference() else mask._version


def _as_flag(mask: Mask) -> Mask:
    """One flag for the whole tensor as a bool, which can be compared and spares the backward pass."""
    if isinstance(mask, RandomMask) and mask.level == "tensor":
        return bool(mask.materialize(()))
    return bool(mask) if isinstance(mask, Tensor) and mask.numel() == 1 else mask
