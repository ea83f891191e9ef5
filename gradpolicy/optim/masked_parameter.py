"""One parameter of a MaskedOptimizer: its mask, ages, state and step."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradpolicy.checks import BIAS_CORRECTIONS, FROZEN_STATES, check_choice
from gradpolicy.errors import PolicyError
from gradpolicy.optim.ages import Ages
from gradpolicy.optim.kernels import EntryUpdate, select
from gradpolicy.optim.layout import Layout, as_sharded, coarse_mask, local_mask, own_gradient
from gradpolicy.optim.other_optimizers import (
    check_entries_can_freeze,
    check_state_of_entries,
    entry_state,
    initial_values,
    warn_of_putting_back,
)
from gradpolicy.optim.submatrix import SubmatrixState
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.wrapped import ParameterState, Wrapped
from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient, whole_gradient
from gradpolicy.tensors.sharding import full_tensor, is_sharded, local_shard


class Options(NamedTuple):
    """The options of a masked parameter: "keep", "zero" or "drop", and "entry" or "tensor"."""

    frozen_state: str = "keep"
    bias_correction: str = "entry"

    @property
    def forget(self) -> bool:
        """True if an entry that freezes loses its state."""
        return self.frozen_state != "keep"

    def changed(self, **options: str | None) -> Options:
        """Return these options with new values; None leaves an option as it is.

        Raises:
            PolicyError: If there is no such value.
        """
        valid = {"frozen_state": FROZEN_STATES, "bias_correction": BIAS_CORRECTIONS}
        given = {key: value for key, value in options.items() if value is not None}
        return self._replace(**{key: check_choice(key, value, valid[key]) for key, value in given.items()})


class Mode(Enum):
    """How a step treats a parameter."""

    PLAIN = "the wrapped optimizer's own update is right as it stands"
    BY_RULE = "the update rule moves the active entries"
    BY_PART = "the wrapped optimizer updates the active rows or columns as a parameter of their own"
    PUT_BACK = "the wrapped optimizer updates it, then frozen entries are put back"
    FROZEN = "nothing changes it"
    ON_OTHERS = "it is frozen on this process and trains on others"


class MaskedParameter:
    """A parameter that has, or once had, a mask.

    Args:
        parameter: The parameter; every entry starts active.
        wrapped: The wrapped optimizer.
        options: The treatment of the state of frozen entries, and the age that bias correction uses.
        updates: Number of updates so far; None: the count in its state.

    Attributes:
        parameter, options: As given.
        submatrix: Which rows or columns the optimizer can step alone; None if it steps whole tensors.
        layout: The order of this process's entries in memory.
        state: Access to the optimizer's state of the parameter.
        ages: Which of this process's entries are active, and their ages.
        updates: Number of updates of the tensor as a whole.
        mask_shape: Shape of the mask as it was set; None after a mask of None.
        empty_mask: This process's part of the mask where it holds no entry; else None.
        frozen_everywhere: True if no entry of the whole tensor is active, on any process.
        copies: Frozen values from before a step that may change them; the next step reuses the memory.
        rows: The result of `active_rows` for the mask; None: not found yet, or none.
    """

    def __init__(
        self, parameter: Tensor, wrapped: Wrapped, options: Options, updates: int | None = None
    ) -> None:
        self.parameter, self.options = parameter, options
        self.layout = Layout.of(parameter)
        self.submatrix = None if is_sharded(parameter) else wrapped.submatrix
        kind = ParameterState if self.submatrix is None else SubmatrixState
        self.state = kind(parameter, wrapped, self.layout)
        self.mask_shape: tuple[int, ...] | None = None
        self.empty_mask: Tensor | None = None
        self.copies: dict[str, Tensor] = {}
        self.rows: ActiveRows | None = None
        self._begin(updates)

    def _begin(self, updates: int | None) -> None:
        """Set every entry active, with its tensor's number of updates as its age."""
        self.updates = self.state.count() if updates is None else updates
        self.ages = Ages.all_active(self.updates, self.layout.size, local_shard(self.parameter).device)
        self.frozen_everywhere = False
        self.state.part = self.state.held = None

    # --- properties

    @property
    def group(self) -> Group:
        """The parameter's param group."""
        return self.state.group

    @property
    def rule(self) -> UpdateRule | None:
        """How the optimizer moves one entry; None where no update rule describes it."""
        return self.state.wrapped.rule

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
        if self.state.part is not None:
            return Mode.BY_PART
        if ages.active == ages.entries:
            by_rule = rule is not None and (self._differs_by_age or rule.counts_in_group)
            return Mode.BY_RULE if by_rule else Mode.PLAIN
        if rule is None:
            return Mode.PUT_BACK
        return Mode.BY_RULE if ages.active else Mode.ON_OTHERS

    @property
    def _differs_by_age(self) -> bool:
        """True if entries are of different ages, and these count."""
        return self.options.bias_correction == "entry" and self.ages.signed.numel() > 1

    def mask(self) -> Tensor:
        """Return the mask as it was set."""
        self.follow()
        if self.mask_shape is None:
            return torch.ones((), dtype=torch.bool, device=self.parameter.device).expand(self.parameter.shape)
        if self.empty_mask is not None:
            return as_sharded(self.empty_mask, self.parameter, self.mask_shape)
        flags = self.ages.of_all_blocks() > 0
        return self.layout.logical(flags, self.ages.block, self.parameter, self.mask_shape)

    def age(self) -> Tensor:
        """Return each entry's age (int64), as coarse as the masks were."""
        self.follow()
        ages = self.ages.dense().long().abs() - 1
        return self.layout.logical(ages, self.ages.block, self.parameter)

    def signed_ages(self) -> Tensor:
        """Return signed ages, as coarse as the masks were; for each entry if the parameter is sharded."""
        self.follow()
        ages = self.ages.dense()
        if is_sharded(self.parameter):
            return self.layout.logical(ages.int(), self.ages.block, self.parameter, self.parameter.shape)
        return self.layout.logical(ages, self.ages.block, self.parameter).clone()

    def dense_state(self) -> dict[str, Any]:
        """Return the optimizer's state of the parameter as the optimizer alone would hold it."""
        return self.state.dense(self.ages)

    def follow(self) -> dict[str, Any]:
        """Move ages to the parameter's device, and reset them if its state was removed.

        Returns:
            The optimizer's state of the parameter.

        Raises:
            PolicyError: If its shape has changed: a kernel would read and write out of bounds.
        """
        if self.parameter.shape != self.layout.whole_shape:
            raise PolicyError(
                f"a parameter of shape {tuple(self.layout.whole_shape)} now has the shape "
                f"{tuple(self.parameter.shape)}; "
                "its masks and ages are no longer known: make a new optimizer for the model and wrap that"
            )
        if self.ages.signed.device != self.parameter.device:
            self.ages, self.copies, self.rows = self.ages.to(self.parameter.device), {}, None
            self.state.to(self.parameter.device)
        values, rule = self.state.values, self.rule
        if values or (rule is None and self.submatrix is None) or not self.layout.size:
            return values
        # Where other processes update their parts, a process without active entries has no state.
        counted = self.ages.oldest > 0 or (self.updates > 0 and not is_sharded(self.parameter))
        if counted and (rule is None or rule.state(self.group) or rule.tensor_state(self.group, 0)):
            self.ages, self.updates = self.ages.restarted(), 0
        return values

    # --- a new mask

    def set_mask(
        self, mask: Tensor | None, frozen_state: str | None = None, bias_correction: str | None = None
    ) -> None:
        """Set the mask, and move the state as the options require.

        Args:
            mask: Bool, of the parameter's dimensions, to which it broadcasts; None: all are active.
            frozen_state: Replaces that of the options; None: it stays.
            bias_correction: Replaces that of the options; None: it stays.

        Raises:
            PolicyError: If an option does not exist, or some entries of the parameter cannot be frozen.
        """
        self.options = self.options.changed(frozen_state=frozen_state, bias_correction=bias_correction)
        self.follow()
        self.state.take_over()
        shape = None if mask is None else tuple(mask.shape)
        if mask is None:
            mask = torch.ones((1,) * self.parameter.dim(), dtype=torch.bool, device=self.parameter.device)
        if is_sharded(self.parameter):
            self.frozen_everywhere = _freezes_whole_tensor(mask)
        if self.layout.size:
            self._set_flags(*self.layout.blocks_of(mask, self.parameter))
        else:
            self._take_empty_mask(mask)
        self.mask_shape = shape
        self._finish_change()

    def _take_empty_mask(self, mask: Tensor) -> None:
        """Keep the mask as it is on a process that holds no entry of the parameter."""
        self.empty_mask = local_mask(mask, self.parameter)
        if not is_sharded(self.parameter):
            self.frozen_everywhere = False
        if self.frozen_everywhere and self.options.forget:
            self._empty_state()

    def _set_flags(self, flags: Tensor, block: int) -> None:
        """Change ages and state so that only these blocks are active."""
        active, forget = int(flags.count_nonzero()) * block, self.options.forget
        partly = 0 < active < self.layout.size
        part = self._find_part(flags, block) if partly else None
        if partly and self.rule is None and part is None:
            optimizer = self.state.wrapped.optimizer
            check_entries_can_freeze(optimizer, self.group, self.parameter)
            warn_of_putting_back(optimizer, forget)
        if not partly:
            flags, block = flags[:1], self.layout.size
        self.state.of_entries(self.ages)  # raises before anything changes
        if not is_sharded(self.parameter):
            self.frozen_everywhere = not active
        fine = min(self.ages.block, block)
        source, self.state.part = self.ages.index_by(fine), part
        self.ages = self.ages.turned(flags, block, active, forget=forget, packs=self._packs(partly))
        self._arrange(source, fine)
        if partly and forget and self.rule is None and part is None:
            self._reset_frozen(entry_state(self.state.values, self.parameter))

    def _find_part(self, flags: Tensor, block: int) -> ActiveRows | None:
        """Return the rows or columns to step alone under a mask on some entries, given by its blocks."""
        rule = self.submatrix
        return None if rule is None else rule.part(self.layout.spread(flags, block), self.parameter)

    def _packs(self, partly: bool) -> bool:
        """Return True if only active blocks keep ages and state."""
        exact = self.rule is not None or self.state.part is not None
        return partly and self.options.frozen_state == "drop" and exact

    def _arrange(self, source: Tensor | None, block: int) -> None:
        """Pack, unpack or empty the state to match the ages and options.

        Args:
            source: The index of the present state; None: it is dense.
            block: Entries in a block of that index.
        """
        if self.ages.active or self.options.frozen_state != "drop":
            self.state.arrange(source, block, self.ages, self.options.forget)
        if not self.ages.active and self.options.forget:
            self._empty_state()

    def _empty_state(self) -> None:
        """Empty the state of a tensor without active entries on this process."""
        self.ages = self.ages._replace(oldest=0)
        if not self.state.values:
            return
        exact, drops = self.rule is not None, self.options.frozen_state == "drop"
        # Without a rule there is one count for the whole tensor, the same on every process.
        restarts = self.options.bias_correction == "entry" and (exact or self.frozen_everywhere)
        if not (restarts and (drops or not exact) and self.state.remove()):
            self.state.empty(drop=drops)
        if restarts:
            self._set_count(0)

    def _finish_change(self) -> None:
        """Complete state and count if the wrapped optimizer makes the next updates."""
        self.rows = None
        if self.is_full and self._rows_differ():
            rows = torch.arange(self.parameter.shape[0], device=self.parameter.device)
            self.state.part = ActiveRows(rows, 0)
        mode = self.mode
        if mode is not Mode.PUT_BACK:
            self.copies = {}
        if self.rule is None or mode is not Mode.PLAIN:
            return
        if self.options.bias_correction == "entry" and self.layout.size:
            age = int(self.ages.dense().abs()) - 1
            if age == 0 and self.state.remove():
                self.updates = 0
                return
            self._set_count(age)
        if self.updates or self.state.values:
            self.state.completed(self.group, self.ages, self.updates)

    def _rows_differ(self) -> bool:
        """Return True if the optimizer's own step would be wrong for some rows, all of which are active."""
        if self.submatrix is None or not self.submatrix.begins or not self.state.values:
            return False
        return self.options.bias_correction == "entry" and bool((self.age() == 0).any())

    def _set_count(self, updates: int) -> None:
        self.updates = updates
        self.state.set_count(updates)

    # --- loaded state and records

    def adopt_state(self, updates: int | None = None) -> None:
        """Take over the optimizer's present state, which is dense and of one age; the mask stays.

        Args:
            updates: Number of updates of the tensor; None: the count in its state.
        """
        mask = None if self.mask_shape is None else self.mask()
        self._begin(updates)
        self.set_mask(mask)

    def restore(
        self, ages: Tensor, mask_shape: tuple[int, ...] | None, updates: int, begun: bool, options: Options
    ) -> None:
        """Load a saved mask and its ages; the optimizer's state is loaded already, and dense.

        Args:
            ages: Signed ages that broadcast to the parameter.
            mask_shape: Shape of the mask as it was set; None: there was none.
            updates: Number of updates of the tensor.
            begun: False if it has not been updated yet; its state is discarded then.
            options: The options that it had.
        """
        self.options = options
        self._begin(updates)
        if not begun:
            self.state.wrapped.optimizer.state.pop(self.parameter, None)
        parameter, self.mask_shape = self.parameter, mask_shape
        if is_sharded(parameter):
            mask = ages > 0 if mask_shape is None else coarse_mask(ages > 0, mask_shape)
            self.frozen_everywhere = _freezes_whole_tensor(mask)
            if not self.layout.size:
                self._take_empty_mask(mask)
                return
            ages = ages if is_sharded(ages) else ages.expand(parameter.shape)
        if self.layout.size:
            self.adopt_ages(*self._coarsest(*self.layout.blocks_of(ages, parameter)))

    def _coarsest(self, values: Tensor, block: int) -> tuple[Tensor, int]:
        """Return ages in the largest blocks that share one; those of a shard were saved for each entry."""
        if not is_sharded(self.parameter):
            return values, block
        physical = self.layout.physical_shape
        sizes = [prod(physical[leading:]) for leading in range(len(physical) + 1)]
        rows = (values.view(-1, size) for size in sizes)
        coarse = next(each for each in rows if bool((each == each[:, :1]).all()))
        return coarse[:, 0].contiguous(), coarse.shape[1]

    def adopt_ages(self, signed: Tensor, block: int) -> None:
        """Set signed ages, one for each block of entries; the state is dense.

        For a sharded parameter, `frozen_everywhere` must be set before.
        """
        self.ages = Ages.of(signed, block, self.layout.size)
        active = self.ages.active
        self.state.part = self._find_part(signed > 0, block) if 0 < active < self.layout.size else None
        if not is_sharded(self.parameter):
            self.frozen_everywhere = not active
        if self._packs(0 < active < self.layout.size):
            self.ages = self.ages.packed()
        if active or self.options.frozen_state == "drop" or self.rule is None:
            self._arrange(None, block)
        self._finish_change()

    # --- updates

    def entry_update(
        self, group: Group, names: tuple[str, ...], gradient: Tensor, age: int | None
    ) -> EntryUpdate:
        """Return the update of the active entries by the rule.

        Args:
            group: The parameter's param group.
            names: Names of the state that the rule keeps for each entry.
            gradient: The parameter's gradient.
            age: The age of all entries; None: each has its own.
        """
        values, ages, memory = self.follow(), self.ages, self.layout.memory
        state = {name: values[name] for name in names if values.get(name) is not None}
        if len(state) < len(names):
            state = self.state.completed(group, ages, self.updates)
        self.state.check(state, ages)
        parameter = memory(self.parameter)
        unwritten = [] if parameter is self.parameter else [(parameter, self.parameter)]
        if ages.index is None:
            for name, value in state.items():
                state[name] = flat = memory(value)
                if flat is not value:
                    unwritten.append((flat, value))
        packed = isinstance(gradient, RowGradient) and self._takes_packed(gradient)
        return EntryUpdate(
            parameter,
            gradient.held.contiguous() if packed else memory(whole_gradient(gradient)),  # type: ignore[attr-defined]
            state,
            ages.signed,
            ages.block,
            ages.index,
            ages.uncounted,
            age,
            unwritten,
            packed,
        )

    def active_rows(self) -> ActiveRows | None:
        """Return the rows, columns or entries to which the gradient can be restricted; None if it cannot.

        It can if the update rule moves the active entries and the parameter is not sharded. Single entries
        also need packed state, and their gradient and index must take at most half the memory of a dense one.
        """
        self.follow()
        if self.rows is None and self.mode is Mode.BY_RULE and not self.is_full:
            self.rows = self._find_rows()
        of_matrix = self.parameter.dim() > 1 and not self.is_full
        return self.state.part if self.state.part is not None and of_matrix else self.rows

    def _find_rows(self) -> ActiveRows | None:
        parameter = self.parameter
        if is_sharded(parameter) or parameter.dim() < 2:
            return None
        mask, ages = self.mask(), self.ages
        rows = ActiveRows.of_mask(mask)
        if rows is None and ages.index is not None and self.layout.plain and 4 * ages.active <= ages.entries:
            positions = mask.expand(parameter.shape).flatten().nonzero().flatten()
            rows = ActiveRows(positions.int() if parameter.numel() < 1 << 31 else positions, None)
        return rows

    def _takes_packed(self, gradient: RowGradient) -> bool:
        """Return True if a gradient holds the active rows, in the order of the active blocks in memory."""
        counts_blocks = self.ages.index is not None or self.ages.block > 1
        return self.layout.plain and counts_blocks and gradient.holds(self.active_rows())

    def part_state(self, rows: ActiveRows, gradient: Tensor) -> dict[str, Any]:
        """Return the state of the rows or columns that are to be stepped alone by this gradient."""
        state, rule = self.state.of_part(rows), self.submatrix  # type: ignore[attr-defined]
        if state and rule is not None and rule.begins and self.options.bias_correction == "entry":
            # The age of a row is that of its oldest entry.
            ages = self.age().movedim(rows.dim or 0, 0)
            ages = ages.flatten(1).amax(1) if ages.dim() > 1 else ages
            young = ages.expand(self.parameter.shape[rows.dim or 0])[rows.positions] == 0
            if young.any():
                rule.begin(state, gradient, young)
        return state

    def count_update(self) -> None:
        """Count an update of the active entries."""
        self.updates += 1
        self.ages = self.ages.counted()
        if self.state.part is not None:
            self.state.set_count(self.updates)

    def count_update_on_others(self) -> None:
        """Count an update that other processes made of their parts of the tensor."""
        self._set_count(self.updates + 1)

    def mask_gradient(self, gradient: Tensor) -> None:
        """Zero the gradient of frozen entries in place, including NaN and infinity."""
        self.follow()
        if isinstance(gradient, RowGradient):
            if gradient.holds(self.active_rows()):
                return
            self.parameter.grad = gradient = gradient.dense()
        gradient = own_gradient(self.parameter, gradient)
        flat, ages = self.layout.flat(gradient), self.ages
        signed = ages.signed if ages.index is None else None
        select(flat.device, flat.dtype).fill_frozen(flat, signed, ages.index, ages.block, 0.0)
        self.layout.write_back(flat, gradient)

    # --- a step of the wrapped optimizer that leaves frozen entries as they are

    def save_frozen(self) -> set[str]:
        """Zero the gradients of frozen entries before a step, and copy what the step may change.

        Returns:
            The names of the copied state; "" is the parameter.
        """
        self.follow()
        if self.ages.active:
            check_state_of_entries(self.state.wrapped.optimizer, self.state.values)
        if self.parameter.grad is not None:
            self.mask_gradient(self.parameter.grad)
        saved = {"": self.parameter, **entry_state(self.state.values, self.parameter)}
        for key, tensor in saved.items():
            flat, copied = self.layout.flat(tensor), self.copies.get(key)
            if copied is None or copied.dtype != flat.dtype:
                copied = self.copies[key] = torch.empty_like(flat)
            copied.copy_(flat)
        return set(saved)

    def restore_frozen(self, saved: set[str]) -> None:
        """Put frozen entries and their state back after the step, bit for bit."""
        own = entry_state(self.state.values, self.parameter)
        for key, tensor in {"": self.parameter, **own}.items():
            if key in saved:
                self._fill_frozen(tensor, self.copies[key])
        self._reset_frozen({key: tensor for key, tensor in own.items() if key not in saved})

    def _reset_frozen(self, state: Mapping[str, Tensor]) -> None:
        """Set the state of frozen entries to its initial values, if these are known."""
        optimizer, parameter = self.state.wrapped.optimizer, self.parameter
        for key, start in initial_values(optimizer, self.group, parameter, state).items():
            value = self.layout.flat(start.to(state[key].dtype)) if start.dim() else float(start)
            self._fill_frozen(state[key], value)

    def _fill_frozen(self, tensor: Tensor, fill: Tensor | float) -> None:
        flat = self.layout.flat(tensor)
        select(flat.device, flat.dtype).fill_frozen(flat, self.ages.signed, None, self.ages.block, fill)
        self.layout.write_back(flat, tensor)


def _freezes_whole_tensor(mask: Tensor) -> bool:
    """Return True if no entry is active on any process; for a sharded mask all must call this."""
    return not int(full_tensor(mask.int().sum() if is_sharded(mask) else mask.count_nonzero()))
