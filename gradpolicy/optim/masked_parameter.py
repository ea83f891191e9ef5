"""One parameter of a MaskedOptimizer: its mask, ages and state."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from gradpolicy.checks import BIAS_CORRECTIONS, FROZEN_STATES, check_choice, check_flag
from gradpolicy.errors import PolicyError, unknown
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.parameter_state import ParameterState
from gradpolicy.optim.put_back import reset_frozen, warn_of_putting_back
from gradpolicy.optim.shapes import as_logical, coarse_mask, fitting_mask, local_entries, local_mask
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import full_tensor, is_sharded


class NewOptions(TypedDict, total=False):
    """Options that replace those of a masked parameter; None leaves one as it is."""

    frozen_state: str | None
    bias_correction: str | None
    master_weights: bool | None


class Options(NamedTuple):
    """The options of a masked parameter: "keep", "zero" or "drop", "entry" or "tensor", True or False."""

    frozen_state: str = "keep"
    bias_correction: str = "entry"
    master_weights: bool = False

    @property
    def forget(self) -> bool:
        """True if an entry that freezes loses its state."""
        return self.frozen_state != "keep"

    def changed(self, **options: Unpack[NewOptions]) -> Options:
        """Return these options with new values; master weights stay once they are wanted.

        Raises:
            PolicyError: If there is no such option or value.
        """
        valid = {"frozen_state": FROZEN_STATES, "bias_correction": BIAS_CORRECTIONS}
        given: Any = {key: value for key, value in options.items() if value is not None}
        for key, value in given.items():
            if key not in self._fields:
                raise unknown("option of a mask", key, self._fields)
            check_choice(key, value, valid[key]) if key in valid else check_flag(key, value)
        changed = self._replace(**given)
        return changed._replace(master_weights=changed.master_weights or self.master_weights)


class Mode(Enum):
    """How a step treats a parameter."""

    PLAIN = "the wrapped optimizer's own update is right as it stands"
    BY_RULE = "the update rule moves the active entries"
    PUT_BACK = "the wrapped optimizer updates it, then frozen entries are put back"
    FROZEN = "nothing changes it"
    ON_OTHERS = "it is frozen on this process and trains on others"


class MaskedParameter:
    """A parameter that has, or once had, a mask.

    Args:
        parameter: The parameter; every entry starts active.
        wrapped: The wrapped optimizer.
        options: The treatment of the state of frozen entries, and the age that bias correction uses.

    Attributes:
        parameter, options: As given.
        shape: Shape of the parameter.
        state: Access to the optimizer's state of the parameter.
        ages: Which of this process's entries are active, and their ages.
        updates: Number of updates of the full tensor.
        mask_shape: Shape of the mask as it was set; None after a mask of None.
        frozen_everywhere: True if no entry of the full tensor is active, on any process.
        cache: What follows from mask and ages, for the updates until the next mask.
        had_mask: True if a mask was ever set.
    """

    def __init__(self, parameter: Tensor, wrapped: Wrapped, options: Options) -> None:
        self.parameter, self.options, self.shape = parameter, options, parameter.shape
        self.state = ParameterState(parameter, wrapped)
        self.mask_shape: tuple[int, ...] | None = None
        self.had_mask = False
        self.state.keep_master_weights(self.options.master_weights)
        self._begin(self.state.count())

    def _begin(self, updates: int) -> None:
        """Set every entry active, with its tensor's number of updates as its age."""
        self.updates = updates
        own = local_entries(self.parameter)
        self.ages = Ages.all_active(self.updates, tuple(own.shape), own.device)
        self.cache: dict[Any, Any] = {}
        self.frozen_everywhere = False

    # --- properties

    @property
    def rule(self) -> UpdateRule | None:
        """How the optimizer moves one entry; None where no update rule describes it."""
        return self.state.rule

    @property
    def group(self) -> Group:
        """The parameter's param group."""
        return self.state.group

    @property
    def is_full(self) -> bool:
        """True if all of this process's entries are active."""
        return self.ages.active == self.ages.entries and not self.frozen_everywhere

    @property
    def mode(self) -> Mode:
        """How a step treats the parameter."""
        if self.frozen_everywhere:
            return Mode.FROZEN
        ages, rule = self.ages, self.rule
        if ages.active == ages.entries:
            if rule is None:
                return Mode.PLAIN
            differs = self.options.bias_correction == "entry" and ages.one is None
            by_rule = differs or rule.counts_in_group or rule.begins_alone(self.state.values, self.group)
            return Mode.BY_RULE if by_rule else Mode.PLAIN
        if rule is None:
            return Mode.PUT_BACK
        return Mode.BY_RULE if ages.active else Mode.ON_OTHERS

    @property
    def bytes(self) -> int:
        """Memory of mask, ages, and what follows from ages."""
        return self.ages.bytes + sum(each.nbytes for made in self.cache.values() for each in made)

    @property
    def name(self) -> str:
        """The parameter's name for messages."""
        return self.state.wrapped.name_of(self.parameter)

    def mask(self) -> Tensor:
        """Return the mask as it was set."""
        self.follow()
        if self.mask_shape is None:
            return torch.ones((), dtype=torch.bool, device=self.parameter.device).expand(self.parameter.shape)
        return as_logical(self.ages.mask, self.parameter, self.ages.shape, self.mask_shape)

    def age(self) -> Tensor:
        """Return each entry's age (int64), as coarse as the masks were."""
        self.follow()
        return as_logical(self.ages.dense().long(), self.parameter, self.ages.shape)

    def signed_ages(self) -> Tensor:
        """Return signed ages, as coarse as the masks were; for each entry if the parameter is sharded."""
        self.follow()
        return as_logical(self.ages.signed(), self.parameter, self.ages.shape)

    def follow(self) -> dict[str, Any]:
        """Move ages to the parameter's device, and reset them if its state was removed.

        Returns:
            The optimizer's state of the parameter.

        Raises:
            PolicyError: If its shape has changed.
        """
        if self.parameter.shape != self.shape:
            raise PolicyError(
                f"a parameter of shape {tuple(self.shape)} now has the shape {tuple(self.parameter.shape)}; "
                "its masks and ages are no longer known: make a new optimizer for the model and wrap that"
            )
        if self.ages.device != self.parameter.device:
            self.ages, self.cache = self.ages.to(self.parameter.device), {}
        values, rule = self.state.values, self.rule
        if values or rule is None or not self.ages.entries:
            return values
        # Where other processes update their parts, a process without active entries has no state.
        counted = self.ages.oldest > 0 or (self.updates > 0 and not is_sharded(self.parameter))
        if counted and (rule.state(self.group) or rule.tensor_state(self.group, 0)):
            self.ages, self.updates, self.cache = self.ages.restarted(), 0, {}
        return values

    # --- a new mask

    def set_mask(self, mask: Any, **new_options: Unpack[NewOptions]) -> None:
        """Set the mask, and move the state as the options require.

        Args:
            mask: Bool, broadcasts to the parameter; a seeded mask; None: all are active.
            **new_options: Replace those of `Options`; None: it stays.

        Raises:
            PolicyError: If the mask does not fit, an option does not exist, or some entries of the parameter
                cannot be frozen.
        """
        mask = None if mask is None else fitting_mask(mask, self.parameter, self.name)
        _check_change(self, mask)
        options = self.options.changed(**new_options)
        self.state.keep_master_weights(options.master_weights)
        self.had_mask = True
        self.follow()
        self.state.take_over()
        shape = None if mask is None else tuple(mask.shape)
        if mask is None:
            mask = torch.ones((1,) * self.parameter.dim(), dtype=torch.bool, device=self.parameter.device)
        own, before, forget = _local(self, mask), self.ages, options.forget
        sharded = is_sharded(self.parameter)
        frozen_everywhere = sharded and _freezes_all(mask)
        # A process without entries cannot tell by its own part of the mask.
        same = not sharded or frozen_everywhere == self.frozen_everywhere
        if same and (options, shape) == (self.options, self.mask_shape) and before.is_mask(own):
            return
        self.options, ages = options, before.turned(own, forget=forget)
        put_back = ages.is_partial and self.rule is None
        if put_back:
            warn_of_putting_back(self)
        self.state.of_entries(before)  # raises before anything changes
        self.frozen_everywhere = frozen_everywhere or _has_none(self, ages)
        self._take(before, ages)
        if put_back and forget:
            reset_frozen(self)
        self.mask_shape = shape
        self._finish_change()

    def _take(self, before: Ages, ages: Ages) -> None:
        """Take new ages, and pack, unpack or empty the state to match them and the options."""
        drops = self.options.frozen_state == "drop"
        if drops and ages.is_partial and self.rule is not None:
            ages = ages.packed()
        self.ages, self.cache = ages, {}
        if ages.active or not drops:
            self.state.arrange(before, ages, self.options.forget)
        if (self.frozen_everywhere or (ages.entries and not ages.active)) and self.options.forget:
            self._empty_state()

    def _empty_state(self) -> None:
        """Empty the state of a tensor without active entries on this process."""
        self.ages = self.ages.restarted()
        if not self.state.values:
            return
        exact, drops = self.rule is not None, self.options.frozen_state == "drop"
        # Without a rule there is one count for the full tensor, the same on every process.
        restarts = self.options.bias_correction == "entry" and (exact or self.frozen_everywhere)
        if not (restarts and (drops or not exact) and self.state.remove()):
            if exact:
                self.state.empty(drop=drops)
            else:
                reset_frozen(self)
        if restarts:
            self.set_count(0)

    def _finish_change(self) -> None:
        """Complete state and count if the wrapped optimizer makes the next updates."""
        if self.rule is None or self.mode is not Mode.PLAIN:
            return
        if self.options.bias_correction == "entry" and self.ages.entries:
            assert self.ages.one is not None
            if self.ages.one == 0 and self.state.remove():
                self.updates = 0
                return
            self.set_count(self.ages.one)
        if self.updates or self.state.values:
            self.state.completed(self.group, self.ages, self.updates)

    def set_count(self, updates: int) -> None:
        """Set the number of updates of the full tensor."""
        self.updates = updates
        self.state.set_count(updates)

    def count_update(self) -> None:
        """Count an update of the active entries."""
        self.updates += 1
        self.ages.count()

    # --- loaded state

    def adopt_state(self) -> None:
        """Take over the optimizer's present state, which is dense and of one age; the mask stays."""
        mask = None if self.mask_shape is None else self.mask()
        self._begin(self.state.count())
        self.set_mask(mask)

    def restore(
        self,
        ages: Tensor,
        mask_shape: tuple[int, ...] | None,
        options: Options,
        *,
        updates: int,
        begun: bool,
    ) -> None:
        """Load a saved mask and its ages; the optimizer's state is loaded already, and dense.

        Args:
            ages: Signed ages that broadcast to the parameter.
            mask_shape: Shape of the mask as it was set; None: there was none.
            options: The options that it had.
            updates: Number of updates of the tensor.
            begun: False if it has not been updated yet; its state is discarded then.
        """
        self.options, self.mask_shape = options, mask_shape
        self.state.keep_master_weights(self.options.master_weights)
        self._begin(updates)
        if not begun:
            self.state.wrapped.optimizer.state.pop(self.parameter, None)
        mask = ages > 0 if mask_shape is None else coarse_mask(ages > 0, mask_shape)
        signed, own = _local(self, ages), _local(self, mask)
        restored = Ages.of(signed, own, self.ages.shape)
        sharded = is_sharded(self.parameter)
        self.frozen_everywhere = _freezes_all(mask) if sharded else _has_none(self, restored)
        if restored.active or self.options.frozen_state == "drop" or self.rule is None or not own.numel():
            self._take(self.ages, restored)
        else:
            self.ages = restored
        if restored.entries:
            self._finish_change()


def _freezes_all(mask: Tensor) -> bool:
    """Return True if no entry is active on any process; for a sharded mask all must call this."""
    return not int(full_tensor(mask.int().sum() if is_sharded(mask) else mask.count_nonzero()))


def _local(masked: MaskedParameter, mask: Tensor) -> Tensor:
    """Return this process's part of a mask or of ages, in the dimensions of the ages."""
    local = local_mask(mask, masked.parameter).to(masked.ages.device)
    return local.unsqueeze(-1) if masked.parameter.is_complex() else local


def _has_none(masked: MaskedParameter, ages: Ages) -> bool:
    """Return True if a parameter that is not sharded has entries, and none of them is active."""
    return not is_sharded(masked.parameter) and ages.entries > 0 and not ages.active


def _check_change(masked: MaskedParameter, mask: Tensor | None) -> None:
    """Check that the optimizer can take another mask now.

    Raises:
        PolicyError: If it cannot.
    """
    if mask is not None and masked.group.get("differentiable", False):
        raise PolicyError(f"{masked.name}: an optimizer with differentiable=True cannot freeze entries")
    if masked.group.get("train_mode", True) or not masked.state.values:
        return
    before = masked.mask().expand(masked.shape)
    if not torch.equal(before, torch.ones_like(before) if mask is None else mask.expand_as(before)):
        raise PolicyError(f"{masked.name}: call train() of the optimizer before its mask changes")
