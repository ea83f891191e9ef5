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
from gradpolicy.optim.shapes import as_logical, coarse_mask, fitting_mask, local_mask
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
    FROZEN = "nothing changes it on this process"


class MaskedParameter(ParameterState):
    """A parameter that has, or once had, a mask.

    Args:
        parameter: The parameter; every entry starts active.
        wrapped: The wrapped optimizer.
        options: The treatment of the state of frozen entries, and the age that bias correction uses.

    Attributes:
        options: As given.
        mask_shape: Shape of the mask as it was set; None after a mask of None.
        frozen_everywhere: True if no entry of the full tensor is active, on any process.
        had_mask: True if a mask was ever set.
    """

    def __init__(self, parameter: Tensor, wrapped: Wrapped, options: Options) -> None:
        super().__init__(parameter, wrapped)
        self.options = options
        self.mask_shape: tuple[int, ...] | None = None
        self.frozen_everywhere = self.had_mask = False
        self.keep_master_weights(options.master_weights)
        self.begin(self.count())

    # --- properties

    @property
    def is_full(self) -> bool:
        """True if all of this process's entries are active."""
        return self.ages.active == self.ages.entries and not self.frozen_everywhere

    @property
    def one_age(self) -> int | None:
        """The age of all active entries in bias correction; None if they differ."""
        return self.updates if self.options.bias_correction == "tensor" else self.ages.one

    @property
    def mode(self) -> Mode:
        """How a step treats the parameter."""
        rule, is_full = self.rule, self.is_full
        if self.frozen_everywhere or (rule is not None and not (is_full or self.ages.active)):
            return Mode.FROZEN
        if rule is None:
            return Mode.PLAIN if is_full else Mode.PUT_BACK
        alone = not is_full or self.one_age is None or rule.counts_in_group
        return Mode.BY_RULE if alone or rule.begins_alone(self.values, self.group) else Mode.PLAIN

    @property
    def bytes(self) -> int:
        """Memory of mask, ages, and what follows from ages."""
        return self.ages.bytes + sum(each.nbytes for made in self.cache.values() for each in made)

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
        self.keep_master_weights(options.master_weights)
        self.had_mask = True
        self.follow()
        self.take_over()
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
        self.of_entries()  # raises before anything changes
        self.frozen_everywhere = frozen_everywhere or _has_none(self, ages)
        self._take(ages)
        if put_back and forget:
            reset_frozen(self)
        self.mask_shape = shape
        self._finish_change()

    def _take(self, ages: Ages) -> None:
        """Take new ages, and pack, unpack or empty the state to match them and the options."""
        drops = self.options.frozen_state == "drop"
        if drops and ages.is_partial and self.rule is not None:
            ages = ages.packed()
        if ages.active or not drops:
            self.arrange(ages, self.options.forget)
        self.ages, self.cache = ages, {}
        if (self.frozen_everywhere or (ages.entries and not ages.active)) and self.options.forget:
            self._empty_state()

    def _empty_state(self) -> None:
        """Empty the state of a tensor without active entries on this process."""
        self.ages = self.ages.restarted()
        if not self.values:
            return
        exact, drops = self.rule is not None, self.options.frozen_state == "drop"
        # Without a rule there is one count for the full tensor, the same on every process.
        restarts = self.options.bias_correction == "entry" and (exact or self.frozen_everywhere)
        if not (restarts and (drops or not exact) and self.remove()):
            if exact:
                self.empty(drop=drops)
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
            if self.ages.one == 0 and self.remove():
                self.updates = 0
                return
            self.set_count(self.ages.one)
        if self.updates or self.values:
            self.wrapped.optimizer.state[self.parameter].update(self.initial(self.group))

    def set_count(self, updates: int) -> None:
        """Set the number of updates of the full tensor."""
        self.updates, rule = updates, self.rule
        counts = {"step": float(updates)} if rule is None else rule.tensor_state(self.group, updates)
        for name, value in counts.items():
            if isinstance(self.values.get(name), Tensor):
                self.values[name].fill_(value)

    def count_update(self) -> None:
        """Count an update of the active entries."""
        self.updates += 1
        self.ages.count()

    # --- loaded state

    def adopt_state(self) -> None:
        """Take over the optimizer's present state, which is dense and of one age; the mask stays."""
        mask = None if self.mask_shape is None else self.mask()
        self.frozen_everywhere = False
        self.begin(self.count())
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
        self.keep_master_weights(self.options.master_weights)
        self.begin(updates)
        if not begun:
            self.wrapped.optimizer.state.pop(self.parameter, None)
        mask = ages > 0 if mask_shape is None else coarse_mask(ages > 0, mask_shape)
        signed, own = _local(self, ages), _local(self, mask)
        restored = Ages.of(signed, own, self.ages.shape)
        sharded = is_sharded(self.parameter)
        self.frozen_everywhere = _freezes_all(mask) if sharded else _has_none(self, restored)
        if restored.active or self.options.frozen_state == "drop" or self.rule is None or not own.numel():
            self._take(restored)
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
    if masked.group.get("train_mode", True) or not masked.values:
        return
    before = masked.mask().expand(masked.shape)
    if not torch.equal(before, torch.ones_like(before) if mask is None else mask.expand_as(before)):
        raise PolicyError(f"{masked.name}: call train() of the optimizer before its mask changes")
